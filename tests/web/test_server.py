"""What every server of ours does before a room answers: refuse other names, ask for the token, send strict headers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import BoundedSemaphore, Event, Thread

import pytest

from shoestring.web.guard import hash_of, headers, is_own_host
from shoestring.web.server import ASKING, GuardedHandler, GuardedServer, HttpRequest
from tests.waiting import HUNG


class Echo(GuardedHandler):
    command_name = "echo"

    def get(self, asked: HttpRequest) -> None:
        self.answer(200, f"{asked.path} {dict(asked.query)}", **asked.headers)


@contextmanager
def served(handler: type[GuardedHandler] = Echo, host: str = "127.0.0.1") -> Iterator[GuardedServer]:
    with GuardedServer(handler, headers("body{}", ""), host) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server: GuardedServer, path: str, **more: str) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=HUNG)
    connection.request("GET", path, headers=more)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_a_room_says_what_is_at_its_addresses() -> None:
    with served() as server:
        status, text, sent = asked(server, "/place?a=1&a=2&b=3")
        assert (status, text) == (200, "/place {'a': '1', 'b': '3'}") and hash_of("body{}") in sent[
            "Content-Security-Policy"
        ]
        assert asked(server, "/healthz")[:2] == (200, "ok\n")
    with served(GuardedHandler) as server:
        assert asked(server, "/")[0] == 404


def test_a_room_is_not_asked_before_the_guard_was() -> None:
    with served(host="0.0.0.0") as server:
        assert asked(server, "/", Host="evil.example")[0] == 403
        status, text, _ = asked(server, "/")
        assert status == 403 and "`shoestring echo` printed" in text
        status, _, sent = asked(server, f"/?token={server.token}")
        assert status == 200 and "HttpOnly" in sent["Set-Cookie"]


@pytest.mark.parametrize(
    "host",
    [
        "[::1].evil.com",
        "[::1]evil.com:80",
        "[::1",
        "::1]",
        "localhost:80.evil.com",
        "[[::1]]",
        "localhost:80:90",
        "evil.com:localhost",
        "[localhost].evil.com",
    ],
)
def test_a_host_that_only_begins_like_ours_is_refused(host: str) -> None:
    assert not is_own_host(host, "127.0.0.1", "box") and not is_own_host(host, "0.0.0.0", "box")


def sent(server: GuardedServer, data: bytes) -> bytes:
    """What comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=HUNG) as line:
        line.sendall(data)
        found = b""
        while piece := line.recv(1 << 16):
            found += piece
    return found


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"400"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
    ],
)
def test_a_request_names_one_host(request_: bytes, status: bytes) -> None:
    with served() as server:
        assert sent(server, request_).split()[1] == status


def test_a_client_that_drips_its_request_is_hung_up_on() -> None:
    with served() as server:
        now = [0.0]

        def clock() -> float:
            """Every look at it is later by a third of the time that a request may take."""
            now[0] += ASKING / 3
            return now[0]

        server.clock = clock
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=HUNG) as line:
            line.sendall(b"G")  # and no more: each look at the clock is after a byte, or before the next
            for byte in b"ET / HTTP/1.1":
                try:
                    line.sendall(bytes([byte]))
                except OSError:
                    break
            assert hung_up(line)


def hung_up(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_more_connections_than_there_are_places_are_told_so_and_the_next_are_served() -> None:
    inside, go_on = Event(), Event()

    class Slow(GuardedHandler):
        def get(self, asked: HttpRequest) -> None:
            inside.set()
            go_on.wait(HUNG)
            self.answer(200, "done")

    with served(Slow) as server:
        server.places = BoundedSemaphore(1)
        first = Thread(target=asked, args=(server, "/"))
        first.start()
        assert inside.wait(HUNG)
        assert sent(server, b"").split()[1] == b"503"
        go_on.set()
        first.join()
        assert server.places.acquire(timeout=HUNG), "its place is free again"
        server.places.release()
        assert asked(server, "/")[0] == 200
