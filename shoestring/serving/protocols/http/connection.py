"""One connection: uvicorn's HTTP protocol, and what it lacks against clients that send too much, too slowly or nothing.

headers larger than most_header          431, closed
no whole request within request_seconds  408, closed
nothing taken for write_seconds          closed
more than most_connections               503, closed
gone before its answer                   the request is withdrawn
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from shoestring.serving.protocols.http.config import ServerConfig

QUIET = logging.getLogger("shoestring.serving.connection")  # what clients do wrong is told to them
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False
REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class LimitedConnection(HttpToolsProtocol):
    def __init__(self, config: Config, state: ServerState, limits: ServerConfig) -> None:
        super().__init__(config, state, {})
        self.logger = self.access_logger = QUIET
        self.access_log = False
        self.limits = limits
        self.in_headers, self.header_bytes = True, 0
        self.refusal = 400, "this is no HTTP request"
        self.request_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.most_connections:
            return self.refuse(503, "too many connections are open")
        return self.expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timers()
        task = self.cycle.scope["state"].get("task") if self.is_answering else None
        super().connection_lost(exc)
        if task is not None:  # nobody wants the answer
            task.cancel()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.in_headers:
            self.header_bytes += len(data)
        super().data_received(data)
        # What came may have a body as well, but then the headers are complete. Of headers that begin behind a request in one
        # piece, that piece is not counted: they may be larger by it.
        if self.in_headers and self.header_bytes > self.limits.most_header:
            self.refuse(431, f"the headers are larger than {self.limits.most_header:,} bytes")

    def on_message_begin(self) -> None:
        if self.request_timer is None:
            self.expect_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.most_header:
            self.refusal = 431, f"the headers are larger than {self.limits.most_header:,} bytes"
            raise httptools.HttpParserError("too large")
        self.in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.in_headers, self.header_bytes = True, 0
        if self.request_timer is not None:
            self.request_timer.cancel()
            self.request_timer = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(*self.refusal)

    def refuse(self, status: int, text: str) -> None:
        """Say why, unless an answer is on its way, and hang up."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps({"error": text}).encode()
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def expect_request(self) -> None:
        self.request_timer = self.loop.call_later(self.limits.request_seconds, self.too_slow)

    def too_slow(self) -> None:
        self.request_timer = None
        self.refuse(408, f"a whole request must come within {self.limits.request_seconds:g} s")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def stop_timers(self) -> None:
        for timer in (self.request_timer, self.write_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self.request_timer = self.write_timer = None

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def protocol_config(app: Any, limits: ServerConfig) -> Config:
    """What uvicorn's protocol wants to know; its server, which wakes ten times a second, is not used."""
    config = Config(
        app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
        server_header=False, date_header=False, timeout_keep_alive=int(limits.keep_seconds) or 1, interface="asgi3",
    )  # fmt: skip
    config.load()
    return config
