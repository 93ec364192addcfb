"""A job's own door: its `answer` makes samples, is handed the outputs, and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shoestring.serving.protocols.encoders import LOOKED_AT, SHORT
from tests.serving import tiny
from tests.serving.serving import Served, serving
from tests.serving.tiny import spec

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def served(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec(2.0, answer=tiny.answer)}) as found:
        yield found


GOOD = {"total": 12.0, "first": 4.0, "embedding": [2.0, 4.0]}


def test_a_job_answers_text_or_json(served: Served) -> None:
    assert served.ask("/answer", {"text": "1 2"}).json == GOOD
    assert served.ask("/answer/tiny", "1 2").json == GOOD, "a function of one argument takes a value"
    assert served.ask("/answer", b"1 2", Content_Type="text/plain; charset=utf-8").json == GOOD
    assert served.ask("/answer", b'{"text": "1 2"}', Content_Type="application/x-www-form-urlencoded").json == GOOD
    assert served.ask("/answer", {"text": "1 2", "scale": 2}).json["total"] == 24.0


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "text: it is missing"),
        ({"txt": "1"}, 400, "txt: there is no such field; there are: text, scale"),
        ({"text": 5}, 400, "text: it must be str, and is 5"),
        ({"text": "1", "scale": "2"}, 400, "scale: it must be float"),
        ({"text": "one"}, 400, "can't use this request: ValueError: could not convert"),
        ({"text": "1", "scale": 1e300}, 500, "can't be written as JSON"),
        (b"\x00", 400, "text: it must be str, and is bytes"),
        ({"text": str(tiny.REFUSED)}, 400, "IndexError: index out of range"),
        ({"text": ""}, 400, "x is empty: a sample needs at least one position"),
    ],
)
def test_what_a_job_can_not_answer_is_named(served: Served, body: Any, status: int, said: str) -> None:
    kind = {"Content-Type": "application/octet-stream"} if isinstance(body, bytes) else {}
    found = served.ask("/answer", body, **kind)
    assert found.status == status and said in found.json["error"], found.body


def test_short_steps_move_from_the_thread_into_the_event_loop_and_long_ones_back(served: Served) -> None:
    assert served.server.front is not None
    encoder, now = served.server.front.encoder("tiny"), [0.0]
    seconds = [SHORT / 2]

    def clock() -> float:
        now[0] += seconds[0]
        return now[0]

    encoder.clock = clock
    for _ in range(LOOKED_AT):
        assert served.ask("/answer", {"text": "1 2"}).json == GOOD
    before = encoder.in_threads
    assert served.ask("/answer", {"text": "1 2"}).json == GOOD and encoder.in_threads == before
    seconds[0] = 3 * SHORT
    for _ in range(LOOKED_AT):
        served.ask("/answer", {"text": "1 2"})
    assert encoder.in_threads > before
