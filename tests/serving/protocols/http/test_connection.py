"""Clients that send too much, too slowly, nonsense or nothing are told so and hung up on; others do not notice."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.serving import Served, serving
from tests.serving.tiny import GATED, spec
from tests.waiting import HUNG, Gates, until

pytestmark = pytest.mark.usefixtures("warm_workers")
GOOD = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def served(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec()}, most_header=2_000, most_connections=30) as found:
        yield found


def sent(served: Served, *pieces: bytes) -> bytes:
    """What comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=HUNG) as line:
        found = b""
        try:
            for piece in pieces:
                line.sendall(piece)
            while more := line.recv(1 << 16):
                found += more
        except ConnectionError:  # it hung up while we still sent
            pass
        return found


def status(answer: bytes) -> bytes:
    return answer.split(b" ", 2)[1] if answer else b""


POST = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1"  # and no more
CLOSE = GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ((CLOSE,), b"200"),
        (tuple(CLOSE[one : one + 1] for one in range(len(CLOSE))), b"200"),
        ((GOOD + CLOSE,), b"200"),
        ((b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 3_000 + b"\r\n\r\n",), b"431"),
        ((b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"a" * 1_500, b"a" * 1_500), b"431"),
        ((b"GET /" + b"a" * 3_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",), b"431"),
        ((b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % one for one in range(400)) + b"\r\n",), b"431"),
        ((b"nonsense\r\n\r\n",), b"400"),
        ((b"\x16\x03\x01\x02\x00\x01\x00\x01",), b"400"),
        ((b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",), b"400"),
        ((b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",), b"400"),
        ((b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n",), b"200"),
        ((b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n",), b"413"),
    ],
)  # fmt: skip
def test_every_beginning_of_a_request_has_its_answer(served: Served, pieces: tuple[bytes, ...], wanted: bytes) -> None:
    found = sent(served, *pieces)
    assert status(found) == wanted, found
    if wanted != b"200":
        assert "error" in json.loads(found.partition(b"\r\n\r\n")[2])


def test_more_connections_than_allowed_are_turned_away_and_those_there_are_go_on(served: Served) -> None:
    until(lambda: not served.server.state.connections)
    lines = [socket.create_connection(("127.0.0.1", served.port), timeout=HUNG) for _ in range(30)]
    until(lambda: len(served.server.state.connections) == 30)
    assert status(sent(served, CLOSE)) == b"503"
    lines[0].sendall(CLOSE)
    assert status(lines[0].recv(1 << 16)) == b"200"
    for line in lines:
        line.close()
    until(lambda: not served.server.state.connections)
    assert status(sent(served, CLOSE)) == b"200"


def test_a_client_that_does_not_send_is_hung_up_on() -> None:
    with serving({"tiny": spec()}, request_seconds=0.3) as served:
        assert status(sent(served)) == b"408"
        assert status(sent(served, GOOD[:20])) == b"408"
        assert status(sent(served, POST)) == b"408"
        both = sent(served, GOOD + GOOD[:20])
        assert both.count(b"HTTP/1.1") == 2 and b"HTTP/1.1 408" in both, "the second request of a connection as well"


def test_a_request_whose_client_goes_away_is_not_computed(tmp_path: Path) -> None:
    def infer(*numbers: float) -> bytes:
        body = json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": numbers}]}).encode()
        head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body

    with Gates(tmp_path, 0) as gates, serving({"tiny": spec(gate=str(tmp_path / "gate-0"))}) as served:
        pool = served.server.repository.pools["tiny"]
        with socket.create_connection(("127.0.0.1", served.port), timeout=HUNG) as first:
            first.sendall(infer(GATED))
            until(lambda: pool.lines[0].batch)
            with socket.create_connection(("127.0.0.1", served.port), timeout=HUNG) as second:
                second.sendall(infer(1.0))
                until(lambda: len(pool.queue) == 1)
            until(lambda: len(pool.queue) == 0, "the withdrawal")
            gates.open(0)
            assert status(first.recv(1 << 16)) == b"200"
        assert served.server.counts.batch_rows["tiny"] == 1 and pool.queue.is_empty
        assert served.server.counts.requests["tiny", "infer", "499"] == 1


@pytest.mark.slow
def test_a_client_that_does_not_take_its_answer_is_hung_up_on() -> None:
    with serving({"tiny": spec()}, write_seconds=0.3) as served, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel takes no whole answer for us
        line.connect(("127.0.0.1", served.port))
        one = {"name": "x", "shape": [1, 600_000], "datatype": "FP32", "data": [1.234567] * 600_000}
        body = json.dumps({"inputs": [one]}).encode()
        head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        until(lambda: served.server.counts.requests["tiny", "infer", "200"] == 1)
        until(lambda: not served.server.state.connections)


def test_a_connection_that_is_not_used_any_more_is_closed() -> None:
    with serving({"tiny": spec()}, keep_seconds=1.0) as served:
        assert status(sent(served, GOOD)) == b"200"
