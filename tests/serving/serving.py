"""A server in a thread of the test's process, its models in processes of their own; and a plain HTTP client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread
from typing import Any, NamedTuple

from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.server import Server, serve
from shoestring.serving.replicas.happenings import Happening
from shoestring.serving.replicas.model_spec import ModelSpec
from tests.waiting import HUNG


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A server that answers."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, server.port
        self.loop = asyncio.get_running_loop()

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> HttpAnswer:
        """POST if there is a body, which is sent as JSON if it is no bytes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=HUNG)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, given)
            answer = connection.getresponse()
            return HttpAnswer(answer.status, {n.lower(): v for n, v in answer.headers.items()}, answer.read())
        finally:
            connection.close()

    def run(self, work: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(HUNG)


@contextmanager
def serving(models: Mapping[str, ModelSpec], told: list[Happening] | None = None, **config: Any) -> Iterator[Served]:
    begun: Future[Served] = Future()

    def run() -> None:
        try:
            serve(
                models, ServerConfig(**{"port": 0} | config), [].append if told is None else told.append,
                lambda server: begun.set_result(Served(server)),
            )  # fmt: skip
        except BaseException as error:
            begun.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    served = None
    try:
        served = begun.result(HUNG)
        yield served
    finally:
        if served is not None:
            served.loop.call_soon_threadsafe(served.server.on_signal)
        thread.join(HUNG)
    assert not thread.is_alive(), "the server stopped"
