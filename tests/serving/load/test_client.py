"""The load client against a server that answers as a body says: every request is sent, whatever became of those before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from shoestring.serving.load.client import LoadTarget, send_all
from shoestring.serving.load.outcome import ANSWERED, FAILED, REFUSED, LoadAnswer, outcome_of


class Answering:
    """Answers a body that is a status with it, hangs up on `drop` and on half of `cut`; `together`: no answer before so many came."""

    def __init__(self, together: int = 1) -> None:
        self.together, self.bodies, self.heads = together, list[bytes](), list[bytes]()
        self.all_came = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
                )
                body = await reader.readexactly(length)
                self.bodies.append(body)
                self.heads.append(head)
                if len(self.bodies) >= self.together:
                    self.all_came.set()
                await self.all_came.wait()
                if body == b"drop":
                    break
                said = b"200" if body == b"cut" else body
                writer.write(
                    b"HTTP/1.1 " + said + b" x\r\nContent-Length: 4\r\n\r\n" + b"done"[: 2 if body == b"cut" else 4]
                )
                await writer.drain()
                if body == b"cut":
                    break
        except asyncio.IncompleteReadError:
            pass  # the client has all that it wanted
        finally:
            writer.close()


def asked(
    bodies: list[bytes], due: list[float], connections: int = 64, together: int = 1, **target: Any
) -> tuple[list[LoadAnswer], Answering]:
    async def run() -> tuple[list[LoadAnswer], Answering]:
        answering = Answering(together)
        async with await asyncio.start_server(answering, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            found = await send_all(LoadTarget(f"http://127.0.0.1:{port}/answer", **target), bodies, due, connections)
        return found, answering

    return asyncio.run(run())


def test_every_kind_of_answer_is_told_for_its_own_request() -> None:
    found, _answering = asked([b"200", b"503", b"429", b"500", b"drop", b"cut"], [0.0] * 6)
    assert [one.status for one in found] == [200, 503, 429, 500, 0, 0]
    assert [one.kind for one in found] == [ANSWERED, REFUSED, REFUSED, FAILED, FAILED, FAILED]
    assert [bool(one.error) for one in found] == [False] * 4 + [True] * 2, "half an answer is none"
    outcome = outcome_of(found, 1.0)
    assert (outcome.answered, outcome.refused, outcome.failed) == (1, 2, 3)


def test_requests_are_sent_while_none_is_answered() -> None:
    """A client that waits for answers would never send the last one, and hide how long others wait."""
    found, answering = asked([b"200"], [0.0] * 40, together=40)
    assert [one.status for one in found] == [200] * 40 and len(answering.bodies) == 40


def test_bodies_go_round_and_nothing_is_sent_twice() -> None:
    due = [0.0, 0.0, 0.001, 0.001, 0.002]
    found, answering = asked([b"200", b"201"], due, connections=1)
    assert [one.due for one in found] == due and [one.status for one in found] == [200, 201, 200, 201, 200]
    assert sorted(answering.bodies) == sorted([b"200"] * 3 + [b"201"] * 2)
    assert all(one.ended >= one.due for one in found)


def test_the_token_is_sent_with_each_and_a_server_that_is_not_there_is_told() -> None:
    _, answering = asked([b"200"], [0.0] * 3, headers={"Authorization": "Bearer secret"})
    assert len(answering.heads) == 3 and all(b"Authorization: Bearer secret\r\n" in head for head in answering.heads)
    heard: list[LoadAnswer] = []
    tell: Callable[[LoadAnswer], None] = heard.append
    (found,) = asyncio.run(send_all(LoadTarget("http://127.0.0.1:1/answer"), [b"200"], [0.0], 1, tell))
    assert found.status == 0 and found.kind == FAILED and "Error" in found.error and heard == [found]


def test_a_test_of_no_requests_has_no_answers() -> None:
    assert asyncio.run(send_all(LoadTarget("http://127.0.0.1:1/answer"), [b"200"], [], 1)) == []
