"""What every server of ours does before a room answers: refuse other names, ask for the token, send strict headers."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread

import pytest

from shoestring.web.guard import hash_of, headers, is_own_host
from shoestring.web.server import Asked, Handler, Server
from tests.waiting import HUNG


class Echo(Handler):
    command_name = "echo"

    def get(self, asked: Asked) -> None:
        self.answer(200, f"{asked.path} {dict(asked.query)}", **asked.headers)


@contextmanager
def served(handler: type[Handler] = Echo, host: str = "127.0.0.1") -> Iterator[Server]:
    with Server(handler, headers("body{}", ""), host) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server: Server, path: str, **more: str) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=HUNG)
    connection.request("GET", path, headers=more)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_a_room_says_what_is_at_its_addresses() -> None:
    with served() as server:
        status, text, sent = asked(server, "/place?a=1&a=2&b=3")
        assert (status, text) == (200, "/place {'a': '1', 'b': '3'}") and hash_of("body{}") in sent["Content-Security-Policy"]
        assert asked(server, "/healthz")[:2] == (200, "ok\n")
    with served(Handler) as server:
        assert asked(server, "/")[0] == 404


def test_a_room_is_not_asked_before_the_guard_was() -> None:
    with served(host="0.0.0.0") as server:
        assert asked(server, "/", Host="evil.example")[0] == 403
        status, text, _ = asked(server, "/")
        assert status == 403 and "`shoestring echo` printed" in text
        status, _, sent = asked(server, f"/?token={server.token}")
        assert status == 200 and "HttpOnly" in sent["Set-Cookie"]


@pytest.mark.parametrize("host", ["[::1].evil.com", "[::1]evil.com:80", "[::1", "::1]", "localhost:80.evil.com", "[[::1]]",
                                  "localhost:80:90", "evil.com:localhost", "[localhost].evil.com"])
def test_a_host_that_only_begins_like_ours_is_refused(host: str) -> None:
    assert not is_own_host(host, "127.0.0.1", "box") and not is_own_host(host, "0.0.0.0", "box")
