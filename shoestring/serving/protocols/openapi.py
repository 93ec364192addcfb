"""The OpenAPI document of a server: its addresses, what they take and what they may say."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from shoestring import __version__
from shoestring.serving.protocols.front import Front
from shoestring.serving.protocols.tensors import DATATYPES

STRING, OBJECT = {"type": "string"}, {"type": "object"}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"anyOf": [STRING, OBJECT]}, "field": STRING}}
ERRORS = {
    400: "a field is wrong",
    401: "the token is missing or wrong",
    403: "this server does not go by that name",
    404: "there is no such model",
    413: "the body is too large",
    415: "the body is of another kind",
    500: "the model or the server failed",
    503: "it could not be answered in time: Retry-After says when to come again",
    504: "the deadline passed",
}
JSON_KINDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def document(front: Front) -> dict[str, Any]:
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": operation("Whether the server lives", {"live": {"type": "boolean"}})},
        "/v2/health/ready": {"get": operation("Whether it answers", {"ready": {"type": "boolean"}})},
        "/v2": {"get": operation("What this server is", {"name": STRING, "version": STRING})},
        "/v1/models": {"get": operation("Models, as OpenAI lists them", {"data": {"type": "array"}})},
        "/v1/embeddings": {"post": operation("Embeddings", {"data": {"type": "array"}}, embeddings_body(front))},
        "/v2/repository/index": {"post": operation("Models and whether they are ready", None, {"type": "object", "properties": {
            "ready": {"type": "boolean"}}, "additionalProperties": False})},
    }  # fmt: skip
    for name, spec in front.repository.specs.items():
        place = f"/v2/models/{name}"
        paths[place] = {
            "get": operation(f"Inputs and outputs of {name}", {"name": STRING, "inputs": {"type": "array"}})
        }
        paths[f"{place}/ready"] = {"get": operation(f"Whether {name} is loaded", {"ready": {"type": "boolean"}})}
        paths[f"{place}/infer"] = {
            "post": operation(f"Tensors through {name}", {"outputs": {"type": "array"}}, infer_body())
        }
        if spec.answer is not None:
            paths[f"/answer/{name}"] = {"post": operation(f"The answer of {name}", None, answer_body(spec.answer))}
    components = {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}, "schemas": {"Error": ERROR}}
    info = {"title": "shoestring", "version": __version__}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": components,
        "security": [{"bearer": []}, {}],
    }


def operation(
    summary: str, properties: Mapping[str, Any] | None, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    good = {"schema": {} if properties is None else {"type": "object", "properties": dict(properties)}}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers = {"200": {"description": "the answer", "content": {"application/json": good}}}
    answers |= {str(status): {"description": text, "content": failed} for status, text in ERRORS.items()}
    found: dict[str, Any] = {"summary": summary, "responses": answers}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": dict(body)}}}
    return found


def infer_body() -> dict[str, Any]:
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": STRING,
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"enum": sorted(set(DATATYPES.values()))},
            "data": {"type": "array"},
        },
    }
    wanted = {"type": "object", "required": ["name"], "properties": {"name": STRING}}
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": STRING,
            "inputs": {"type": "array", "items": tensor, "minItems": 1},
            "outputs": {"type": "array", "items": wanted},
        },
    }


def embeddings_body(front: Front) -> dict[str, Any]:
    texts = {"anyOf": [STRING, {"type": "array", "items": STRING}]}
    names = [name for name, spec in front.repository.specs.items() if spec.answer is not None]
    forms = {"enum": ["float", "base64"]}
    properties = {"input": texts, "model": {"enum": names or [""]}, "encoding_format": forms}
    return {"type": "object", "required": ["input", "model"], "properties": properties}


def answer_body(function: Any) -> dict[str, Any]:
    """The fields of a request are the arguments of the job's `answer`."""
    fields, needed = {}, []
    for name, one in inspect.signature(function).parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        kind = getattr(one.annotation, "__name__", one.annotation)
        fields[name] = {"type": JSON_KINDS[kind]} if kind in JSON_KINDS else {}
        if one.default is inspect.Parameter.empty:
            needed.append(name)
    return {"type": "object", "required": needed, "properties": fields}
