"""Before any door: the name that was asked for, the token, where the page came from. After it: strict headers.

health                      open to all, so that a proxy may ask without a secret
everything else             Host is a name of ours; Origin, if a browser sends one, too
                            beyond this machine: Authorization: Bearer TOKEN, or for the page ?token=TOKEN once, then a cookie
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.errors import error_response
from shoestring.serving.protocols.http.refusals import RefusedRequest
from shoestring.web.guard import asked_host, has_token, is_own_host

HEALTH = ("/v2/health/live", "/v2/health/ready", "/healthz", "/readyz")
COOKIE = "shoestring-serve"


class HttpGuard:
    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        token: str,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`token`: empty if none is needed. `clock`: seconds since 1970, for the header Date."""
        self.app, self.config, self.token, self.clock = app, config, token, clock
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.machine = socket.gethostname()
        self.date = 0, b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server answers HTTP only, not {scope['type']}")
        scope["state"]["task"] = asyncio.current_task()  # which connection.py cancels where the client goes away
        more = self.headers
        if self.token and "token" in parse_qs(scope["query_string"].decode("latin-1")):
            value = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            more = [*more, (b"set-cookie", (value + "; Secure" * bool(self.config.certificate)).encode())]

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *more, (b"date", self.date_header())]
            await send(message)

        try:
            self.check(scope)
        except RefusedRequest as error:
            more = self.headers
            return await error_response(error, scope["path"])(scope, receive, send_guarded)
        return await self.app(scope, receive, send_guarded)

    def date_header(self) -> bytes:
        now = int(self.clock())
        if now != self.date[0]:
            self.date = now, formatdate(now, usegmt=True).encode()
        return self.date[1]

    def check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] in HEALTH:
            return
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise RefusedRequest(400, "a request names one host", "host")
        if not self.is_ours(hosts[0]):
            raise RefusedRequest(403, "this server does not go by that name; add it to its hosts if it should", "host")
        origin = headers.get("origin")
        if origin is not None and not self.is_ours(urlsplit_host(origin)):
            raise RefusedRequest(403, "pages of other servers may not ask this one", "origin")
        if self.token and not self.has_token(headers, scope["query_string"].decode("latin-1")):
            told = {"WWW-Authenticate": "Bearer"}
            raise RefusedRequest(
                401, "send the token that the server printed: Authorization: Bearer TOKEN", "authorization", told
            )

    def is_ours(self, header: str) -> bool:
        return is_own_host(header, self.config.host, self.machine) or asked_host(header) in map(
            str.lower, self.config.hosts
        )

    def has_token(self, headers: Headers, query: str) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return True
        return has_token(self.token, query, headers.get("cookie", ""), COOKIE)


def urlsplit_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
