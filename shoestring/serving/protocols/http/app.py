"""The application: which address is which door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoestring import __version__
from shoestring.serving.protocols.embeddings import embeddings
from shoestring.serving.protocols.front import Door, Front
from shoestring.serving.protocols.http.asked import requirements_in
from shoestring.serving.protocols.http.body import read_body, read_value
from shoestring.serving.protocols.http.errors import error_response, on_missing
from shoestring.serving.protocols.http.refusals import wrong
from shoestring.serving.protocols.http.strict_json import checked_object, read_json, written_json
from shoestring.serving.protocols.inference import LENGTH_HEADER, metadata, read_infer, written_infer
from shoestring.serving.protocols.openapi import document
from shoestring.serving.protocols.page import PAGE
from shoestring.serving.replicas.repository import UnknownModel
from shoestring.serving.sample import Sample, Tensors

EXTENSIONS = ["binary_tensor_data", "model_repository"]


class Doors:
    """The doors of one server. Each answers one request."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def model(self, request: Request) -> str:
        """The model that the address names; else the first."""
        name: str = request.path_params.get("model", self.front.first)
        spec = self.front.repository.spec(name)
        request.scope["shoestring.model"] = name
        if request.path_params.get("version", spec.version) != spec.version:
            raise UnknownModel(f"{name!r} has the version {spec.version} only")
        return name

    async def infer(self, request: Request) -> Response:
        model = self.model(request)
        asked = requirements_in(request.headers, self.front.config.answer_seconds)
        body = await read_body(request, self.front.config.most_body)
        signature = await self.front.signature(model)
        found = read_infer(body, request.headers.get(LENGTH_HEADER, ""), signature, self.front.config.most_rows)
        answers = await self.front.answers(model, found.samples, asked.and_also(found.asked))
        version = self.front.repository.spec(model).version
        data, length = written_infer(model, version, found, answers)
        if length is None:
            return as_json(data)
        return Response(data, headers={LENGTH_HEADER: str(length)}, media_type="application/octet-stream")

    async def answer(self, request: Request) -> Response:
        model = self.model(request)
        asked = requirements_in(request.headers, self.front.config.answer_seconds)
        encoder = self.front.encoder(model)
        given = await read_value(request, self.front.config.most_body)
        signature = await self.front.signature(model)

        async def compute(samples: Sequence[Sample]) -> list[Tensors]:
            return await self.front.answers(model, samples, asked)

        found = await encoder.answer(given, signature, compute)
        return (
            Response(found, media_type="application/octet-stream")
            if isinstance(found, bytes)
            else as_json(written_json(found))
        )

    async def embeddings(self, request: Request) -> Response:
        asked = requirements_in(request.headers, self.front.config.answer_seconds)
        body = read_json(await read_body(request, self.front.config.most_body))
        if (
            isinstance(body, dict)
            and isinstance(body.get("model"), str)
            and body["model"] in self.front.repository.specs
        ):
            request.scope["shoestring.model"] = body["model"]
        return as_json(written_json(await embeddings(self.front, body, asked)))

    async def openai_models(self, request: Request) -> Response:
        models = [{"id": one.name, "object": "model", "created": 0, "owned_by": "shoestring"} for one in self.index()]
        return as_json(written_json({"object": "list", "data": models}))

    async def live(self, request: Request) -> Response:
        return as_json(b'{"live":true}')

    async def ready(self, request: Request) -> Response:
        is_ready = self.front.repository.is_ready and not self.front.stopping
        return as_json(written_json({"ready": is_ready}), 200 if is_ready else 503)

    async def server(self, request: Request) -> Response:
        return as_json(written_json({"name": "shoestring", "version": __version__, "extensions": EXTENSIONS}))

    async def describe(self, request: Request) -> Response:
        model = self.model(request)
        signature = await self.front.signature(model)
        return as_json(written_json(metadata(model, self.front.repository.spec(model).version, signature)))

    async def model_ready(self, request: Request) -> Response:
        state = self.front.repository.state(self.model(request))
        is_ready = state.state == "READY"
        more = {} if is_ready else {"error": state.reason or "it is loaded now"}
        return as_json(written_json({"name": state.name, "ready": is_ready, **more}), 200 if is_ready else 503)

    def index(self) -> list[Any]:
        return self.front.repository.index()

    async def repository_index(self, request: Request) -> Response:
        body = await read_body(request, self.front.config.most_body)
        asked = checked_object(read_json(body), "body", ("ready", "repository_name")) if body.strip() else {}
        if asked.get("repository_name"):
            raise wrong("repository_name", "there is one repository, without a name")
        lines = [one for one in self.index() if one.state == "READY" or asked.get("ready") is not True]
        return as_json(written_json([vars(one) for one in lines]))

    async def load(self, request: Request) -> Response:
        await self.no_parameters(request)
        await self.front.repository.load(self.model(request))
        return as_json(b"{}")

    async def unload(self, request: Request) -> Response:
        await self.no_parameters(request)
        await self.front.repository.unload(self.model(request))
        return as_json(b"{}")

    async def no_parameters(self, request: Request) -> None:
        """A client may say when a model is loaded, never what is loaded."""
        body = await read_body(request, self.front.config.most_body)
        asked = checked_object(read_json(body), "body", ("parameters",)) if body.strip() else {}
        for name in checked_object(asked.get("parameters", {}), "parameters"):
            if name != "unload_dependents":
                raise wrong(f"parameters.{name}"[:200], "models are configured where the server is started")

    async def metrics(self, request: Request) -> Response:
        queues = {name: (len(one.queue), len(one.lines)) for name, one in self.front.repository.pools.items()}
        return Response(self.front.counts.text(queues), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return as_json(written_json(document(self.front)))

    async def page(self, request: Request) -> Response:
        return Response(PAGE, media_type="text/html; charset=utf-8")


def as_json(data: bytes, status: int = 200) -> Response:
    return Response(data, status, media_type="application/json")


def answering(door: Door) -> Door:
    """A door that answers with an error where it fails."""

    async def answer(request: Request) -> Response:
        try:
            return await door(request)
        except Exception as error:
            return error_response(error, request.url.path)

    return answer


def application(front: Front) -> Starlette:
    doors = Doors(front)

    def route(path: str, door: Door, method: str = "GET") -> Route:
        counted = front.with_counts(door.__name__, door) if method == "POST" else door
        return Route(path, answering(counted), methods=[method])

    model = "/v2/models/{model}"
    return Starlette(
        routes=[
            *(
                route(f"{place}{end}", door, method)
                for place in (model, f"{model}/versions/{{version}}")
                for end, door, method in (
                    ("/infer", doors.infer, "POST"),
                    ("/ready", doors.model_ready, "GET"),
                    ("", doors.describe, "GET"),
                )
            ),
            route("/answer", doors.answer, "POST"),
            route("/answer/{model}", doors.answer, "POST"),
            route("/v1/embeddings", doors.embeddings, "POST"),
            route("/v1/models", doors.openai_models),
            route("/v2/health/live", doors.live),
            route("/v2/health/ready", doors.ready),
            route("/healthz", doors.live),
            route("/readyz", doors.ready),
            route("/v2", doors.server),
            route("/v2/repository/index", doors.repository_index, "POST"),
            route("/v2/repository/models/{model}/load", doors.load, "POST"),
            route("/v2/repository/models/{model}/unload", doors.unload, "POST"),
            route("/metrics", doors.metrics),
            route("/openapi.json", doors.openapi),
            route("/", doors.page),
        ],
        exception_handlers={HTTPException: on_missing},
    )
