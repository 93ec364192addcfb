"""Admission: who is refused could not have been answered in time, and who is accepted is, if batches take what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from shoestring.serving.batching.admission import Admission, AdmissionLoad, AffineTime, Pace
from shoestring.serving.batching.policy import Batching, Waiting
from shoestring.serving.batching.queue import RequestQueue

TIME = AffineTime(base=0.5, per_row=0.25, per_token=1.0)
PACKED = Batching(tokens=30, rows=8, packed=True)


def simulated_end(waiting: Sequence[int], busy: Sequence[float], how: Batching) -> float:
    """When the last of these requests is answered, by the real queue, with replicas that are free after `busy` seconds."""
    queue: RequestQueue[int] = RequestQueue(how)
    last = [queue.put(place, Waiting(length, float(place))) for place, length in enumerate(waiting)][-1]
    free = sorted(busy)
    while batch := queue.take(1e6):
        begun = free.pop(0)
        tokens = batch.tokens if how.packed else batch.rows * max(one.waiting.length for one in batch.requests)
        ended = begun + TIME.seconds(batch.rows, tokens)
        if last in batch.requests:
            return ended
        free = sorted([*free, ended])
    raise AssertionError("the last one was computed")


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    busy=st.lists(st.integers(0, 20), min_size=1, max_size=3),
)
def test_what_is_expected_is_near_what_the_queue_does(lengths: list[int], busy: list[int]) -> None:
    """The estimate fills batches to the brim, which the queue can't; so it may be late by the share of a batch that stays empty."""
    load = AdmissionLoad(len(lengths) - 1, sum(lengths[:-1]), [float(one) for one in busy])
    expected = Admission(PACKED).seconds_to_answer(load, 1, lengths[-1], TIME)
    found = simulated_end(lengths, load.busy, PACKED)
    full = TIME.seconds(8, 30)
    assert found <= 2 * expected + full
    if len(set(lengths)) == 1:  # else a short one finds a place in an earlier batch
        assert expected <= found + sum(busy) + full


@given(
    rows=st.integers(0, 50),
    length=st.integers(1, 40),
    target=st.floats(0.1, 100),
    within=st.sampled_from([0.5, 20.0, inf]),
)
def test_who_is_turned_away_is_told_when_to_come_and_an_idle_server_turns_nobody_away(
    rows: int, length: int, target: float, within: float
) -> None:
    admission = Admission(PACKED, TIME, target)
    load = AdmissionLoad(rows, 10 * rows, [0.0])
    turned = admission.refusal(load, 1, length, within=within)
    expected = admission.seconds_to_answer(load, 1, length, TIME)
    alone = admission.seconds_to_answer(AdmissionLoad(0, 0, [0.0]), 1, length, TIME)
    if turned is None:
        assert expected <= max(target, alone) and expected <= within
    else:
        assert turned.retry_after > 0 and (turned.retry_after < inf) == (alone <= within)
    if not rows and alone <= within:
        assert turned is None


def test_a_slower_machine_is_noticed() -> None:
    admission, pace = Admission(PACKED, TIME, target=40.0), Pace()
    load = AdmissionLoad(2, 20, [0.0])
    assert admission.refusal(load, 1, 5, pace.factor) is None
    for _ in range(100):
        pace = pace.after(predicted=1.0, measured=2.0)
    assert admission.refusal(load, 1, 5, pace.factor) is not None
    assert pace.after(0.0, 1.0) == pace == pace.after(1.0, 0.0), "nothing follows from no time"


def test_without_a_measurement_only_the_number_that_waits_is_limited() -> None:
    admission = Admission(PACKED, most_rows=3)
    assert admission.refusal(AdmissionLoad(2, 10**9, [1e9]), 1, 10**9) is None
    assert admission.refusal(AdmissionLoad(3, 3, [0.0]), 1, 1) is not None
    assert admission.refusal(AdmissionLoad(0, 0, [0.0]), 1, 1, within=0.0) is not None
