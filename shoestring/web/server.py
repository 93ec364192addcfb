"""An HTTP server that only answers under its own name, asks for a token beyond this machine, and sends strict headers
with every answer.

A room inherits from both classes and serves its addresses in `GuardedHandler.get`.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader, RawIOBase
from socketserver import TCPServer
from threading import BoundedSemaphore, Event
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shoestring.core.errors import Mistake
from shoestring.web.guard import WILDCARDS, has_token, is_loopback, is_own_host

TEXT = "text/plain; charset=utf-8"
ASKING = 10.0  # seconds for a client to send its whole request
AT_ONCE = 200  # most simultaneous connections, each with a thread; an open page holds one
FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nToo many pages are open.\n"


@dataclass(frozen=True)
class HttpRequest:
    """A request that passed the guard."""

    path: str
    query: Mapping[str, str]  # the first value of each name
    headers: Mapping[str, str]  # of the answer: the cookie for a client that came with the token


class GuardedServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # waiting connections: a browser with many tabs opens them all at once

    def __init__(
        self, handler: type[GuardedHandler], headers: Mapping[str, str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.host, self.headers, self.closing = host, headers, Event()
        self.places, self.clock = BoundedSemaphore(AT_ONCE), time.monotonic
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            raise Mistake(
                f"can't listen on {host or 'all addresses'}, port {port} ({error}): give another --port, or none to have a "
                f"free one picked, and a --host of this machine"
            ) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.acquire(blocking=False):
            with suppress(OSError):
                request.sendall(FULL)
            return self.shutdown_request(request)
        try:
            return super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's version would resolve our name
        self.server_port = self.server_address[1]

    @property
    def url(self) -> str:
        host = own_address() if self.host in WILDCARDS else self.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.server_port}/" + (f"?token={self.token}" if self.token else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # a browser that went away is no error
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()


class RequestReader(RawIOBase):
    """Reads a client's request until its deadline. A timeout per read would not stop a client that sends a byte now and
    then."""

    def __init__(self, connection: socket.socket, clock: Callable[[], float]) -> None:
        self.connection, self.clock = connection, clock
        self.until = clock() + ASKING

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left, usual = self.until - self.clock(), self.connection.gettimeout()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self.connection.settimeout(left)
        try:
            return self.connection.recv_into(buffer)
        finally:
            self.connection.settimeout(usual)


class GuardedHandler(BaseHTTPRequestHandler):
    server: GuardedServer
    timeout = 30  # seconds for a client to receive something
    command_name = "serve"  # the `shoestring` command that printed the address
    home = "There is nothing here.\n"  # what else to say about an unknown address

    def get(self, asked: HttpRequest) -> None:
        """Answer a request that passed the guard."""
        self.answer(404, self.home)

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = BufferedReader(RequestReader(self.connection, self.server.clock))

    def parse_request(self) -> bool:
        """Refuse a request with two Host headers: a proxy might have checked the other one."""
        if not super().parse_request():
            return False
        if len(self.headers.get_all("Host", ())) > 1:
            self.answer(400, "A request names one host.\n")
            return False
        return True

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
        except ValueError:
            return self.answer(400, "This is no address. " + self.home)
        if asked.netloc:  # a host in the request line is another one
            return self.answer(400, "Ask for an address on this server. " + self.home)
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        server, cookie = self.server, f"shoestring-{self.server.server_port}"
        printed = f"that `shoestring {self.command_name}` printed.\n"
        if not is_own_host(self.headers.get("Host", ""), server.host, socket.gethostname()):
            return self.answer(403, f"This server does not go by that name. Open the address {printed}")
        if server.token and not has_token(server.token, asked.query, self.headers.get("Cookie", ""), cookie):
            return self.answer(403, f"The token is missing or wrong. Open the whole address {printed}")
        secret = (
            {"Set-Cookie": f"{cookie}={server.token}; Path=/; HttpOnly; SameSite=Strict"}
            if "token" in query and server.token
            else {}
        )
        if asked.path == "/healthz":
            return self.answer(200, "ok\n", **secret)
        return self.get(HttpRequest(asked.path, query, secret))

    def refuse(self) -> None:
        self.answer(405, "This page can only be looked at.\n", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def answer(self, status: int, text: str, kind: str = TEXT, **headers: str) -> None:
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
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "shoestring"

    def log_message(self, *words: object) -> None:
        """Log nothing: the terminal is the user's."""


def own_address() -> str:
    """The address at which other machines reach this one. Nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation, RFC 5737
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
