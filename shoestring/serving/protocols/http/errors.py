"""How errors look on the wire: the Open Inference Protocol's object, or OpenAI's for its doors."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shoestring.core.errors import error_sentence
from shoestring.serving.protocols.http.refusals import ErrorAnswer, RefusedRequest, error_answer
from shoestring.serving.protocols.http.strict_json import written_json

LOG = logging.getLogger("shoestring.serving")


def error_response(error: Exception, path: str) -> Response:
    found = error_answer(error)
    if found is None:  # a fault of ours: the log has where, the client its name
        LOG.error("a request failed", exc_info=error)
        found = ErrorAnswer(500, f"the server failed: {error_sentence(error)}", "", {})
    body = written_json(openai_error(found) if path.startswith("/v1/") else plain_error(found))
    return Response(body, found.status, dict(found.headers), "application/json")


def plain_error(found: ErrorAnswer) -> dict[str, Any]:
    return {"error": found.text} | ({"field": found.field} if found.field else {})


def openai_error(found: ErrorAnswer) -> dict[str, Any]:
    kind = "invalid_request_error" if found.status < 500 else "server_error"
    return {"error": {"message": found.text, "type": kind, "param": found.field or None, "code": None}}


async def on_missing(request: Request, error: Exception) -> Response:
    """No such address, or not by this method."""
    status = getattr(error, "status_code", 404)
    text = {404: "there is nothing here; see / or /openapi.json", 405: f"{request.method} is not possible here"}
    headers = getattr(error, "headers", None)
    return error_response(
        RefusedRequest(status, text.get(status, "this can't be answered"), headers=headers), request.url.path
    )
