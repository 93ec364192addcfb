"""The server behind a watched page: four addresses, only ever read.

    /            the run, or a card for each if there are several
    /run/NAME    one run
    /events      what stands inside the page, sent each time it changed (?run=NAME for one run)
    /healthz     ok
"""
from __future__ import annotations

import re
import secrets
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Event
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from shoestring.core.errors import Mistake
from shoestring.show.page.live import live
from shoestring.show.watch.follow import LOOK, Watch
from shoestring.show.watch.guard import HEADERS, WILDCARDS, has_token, is_loopback, is_own_host

BEAT = 10.0   # seconds of silence after which a sign of life is sent


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128   # connections that wait to be taken: a browser with many tabs opens them all at once

    def __init__(self, watch: Watch, host: str = "127.0.0.1", port: int = 0) -> None:
        self.watch, self.host, self.closing = watch, host, Event()
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise Mistake(f"can't listen on {host or 'all addresses'}, port {port} ({error}): give another --port, or none to have a "
                          f"free one picked, and a --host of this machine") from error

    def server_bind(self) -> None:
        TCPServer.server_bind(self)   # HTTPServer would ask a name server for our name
        self.server_port = self.server_address[1]

    @property
    def url(self) -> str:
        host = own_address() if self.host in WILDCARDS else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):   # a browser that went away is no error
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
        except ValueError:
            return self.answer(400, "This is no address. The runs are at /\n")
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        server, cookie = self.server, f"shoestring-{self.server.server_port}"
        if not is_own_host(self.headers.get("Host", ""), server.host, socket.gethostname()):
            return self.answer(403, "This server does not go by that name. Open the address that `shoestring watch` printed.\n")
        if server.token and not has_token(server.token, asked.query, self.headers.get("Cookie", ""), cookie):
            return self.answer(403, "The token is missing or wrong. Open the whole address that `shoestring watch` printed.\n")
        secret = {"Set-Cookie": f"{cookie}={server.token}; Path=/; HttpOnly; SameSite=Strict"} if "token" in query and server.token else {}
        if asked.path == "/healthz":
            return self.answer(200, "ok\n", **secret)
        if asked.path == "/events":
            return self.stream(query.get("run"), self.headers.get("Last-Event-ID") or query.get("seen", ""))
        if asked.path == "/" or asked.path.startswith("/run/"):
            return self.page(unquote(asked.path[len("/run/"):]) if asked.path != "/" else None, secret)
        return self.answer(404, "There is nothing here. The runs are at /\n")

    def refuse(self) -> None:
        self.answer(405, "This page can only be looked at.\n", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def page(self, name: str | None, secret: dict[str, str]) -> None:
        view = self.server.watch.view(name)
        if view is None:
            return self.answer(404, "There is no such run here. The runs are at /\n")
        events = f"/events?seen={view.mark}" + (f"&run={quote(name, safe='')}" if name else "")
        among = name if name and len(self.server.watch.runs) > 1 else ""
        return self.answer(200, live(view.title, view.content, events, among), "text/html; charset=utf-8", **secret)

    def stream(self, name: str | None, seen: str) -> None:
        """Send the page each time it changed, until the browser or this server goes."""
        if self.server.watch.view(name) is None:
            return self.answer(404, "There is no such run here. The runs are at /\n")
        self.begin(200, "text/event-stream; charset=utf-8")
        self.wfile.write(b"retry: 1000\n\n")
        told = time.monotonic()
        while view := self.server.watch.view(name):
            if view.mark != seen:
                seen, told = view.mark, time.monotonic()
                data = "".join(f"data: {line}\n" for line in re.split("\r\n|\r|\n", view.content))
                self.wfile.write(f"id: {seen}\n{data}\n".encode())
            elif time.monotonic() - told > BEAT:
                told = time.monotonic()
                self.wfile.write(b": still here\n\n")
            if self.server.closing.wait(LOOK):
                return None
        return None

    def answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8", **headers: str) -> None:
        data = text.encode()
        self.begin(status, kind, **{"Content-Length": str(len(data))}, **headers)
        if self.command != "HEAD":
            self.wfile.write(data)

    def begin(self, status: int, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "shoestring"

    def log_message(self, *words: object) -> None:
        """Say nothing: the terminal is the user's."""


def own_address() -> str:
    """The address other machines reach this one at. Nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))   # an address for documentation, RFC 5737
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
