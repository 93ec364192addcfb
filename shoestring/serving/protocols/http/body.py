"""The body of a request, which is never larger than allowed."""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect, Request

from shoestring.serving.protocols.http.refusals import RefusedRequest
from shoestring.serving.protocols.http.strict_json import read_json

JSON = ("application/json", "application/x-www-form-urlencoded", "")  # curl says the second unless told otherwise


async def read_body(request: Request, most: int) -> bytes:
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise RefusedRequest(415, "send the body as it is, without compression", "content-encoding")
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most:
        raise too_large(most)
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise too_large(most)
            pieces.append(piece)
    except ClientDisconnect:
        raise RefusedRequest(400, "the connection was cut within the body") from None
    return b"".join(pieces)


def too_large(most: int) -> RefusedRequest:
    return RefusedRequest(413, f"the body is larger than {most:,} bytes", headers={"Connection": "close"})


async def read_value(request: Request, most: int) -> Any:
    """JSON, a text, or bytes, by what the request says it is."""
    data = await read_body(request, most)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "text/plain":
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise RefusedRequest(400, f"the body is not UTF-8: byte {error.start}") from None
    if kind == "application/octet-stream" or kind.startswith(("image/", "audio/", "video/")):
        return data
    if kind in JSON or kind.endswith("+json"):
        return read_json(data)
    raise RefusedRequest(
        415, f"send application/json, text/plain, or bytes as application/octet-stream, not {kind}", "content-type"
    )
