"""Schedules of pipelines: drawn tables, and what holds for all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import from_json, to_json
from shoestring.core.workers.actions import Action, ActionSpan, Kind, Timeline, idle_share
from shoestring.training.pipeline.schedule import (
    SCHEDULES,
    Orders,
    activation_counts,
    activation_counts_by_formula,
    bubble,
    orders,
    staleness,
    timeline_of,
)

SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUTS: 1.0, Kind.WEIGHTS: 1.0}
BACKWARDS = (Kind.BACKWARD, Kind.INPUTS)
cases = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3)).map(
    lambda case: (*case[:3], case[3] if case[0] == "interleaved" else 1)
)


def unit(action: Action) -> float:
    return SECONDS[action.kind]


def listed(found: Orders) -> list[str]:
    """What every worker does; of several chunks a worker, the second is b, the third c."""
    return [" ".join(f"{one.kind}{one.piece}{' bc'[one.chunk // len(found)].strip()}" for one in own) for own in found]


def test_the_orders_of_three_workers_and_four_pieces() -> None:
    assert listed(orders("naive", 3, 4)) == ["F0 B0 F1 B1 F2 B2 F3 B3"] * 3
    assert listed(orders("gpipe", 3, 4)) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3
    assert listed(orders("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert listed(orders("zero-bubble", 3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert orders("pipedream", 3, 4) == orders("1f1b", 3, 4)


def test_interleaved_pieces_go_in_rounds_through_the_chunks_of_a_worker() -> None:
    assert listed(orders("interleaved", 2, 4, 2)) == [
        "F0 F1 F0b F1b F2 B0b F3 B1b F2b B0 F3b B1 B2b B3b B2 B3",
        "F0 F1 F0b B0b F1b B1b F2 B0 F3 B1 F2b B2b F3b B3b B2 B3",
    ]
    assert listed(orders("interleaved", 2, 3, 2))[1] == "F0 F1 F2 F0b B0b F1b B1b F2b B2b B0 B1 B2", (
        "one round of three"
    )
    assert orders("interleaved", 3, 5, 1) == orders("1f1b", 3, 5)


@settings(max_examples=300, deadline=None)
@given(cases)
def test_every_piece_goes_forward_once_and_backward_once_through_every_chunk(case: tuple[str, int, int, int]) -> None:
    schedule, stages, pieces, chunks = case
    found = orders(*case)
    kinds = (Kind.FORWARD, Kind.INPUTS, Kind.WEIGHTS) if schedule == "zero-bubble" else (Kind.FORWARD, Kind.BACKWARD)
    for worker, own in enumerate(found):
        assert Counter(own) == Counter(
            Action(kind, piece, chunk)
            for kind in kinds
            for piece in range(pieces)
            for chunk in range(worker, stages * chunks, stages)
        )


@settings(max_examples=300, deadline=None)
@given(cases, st.lists(st.floats(0.01, 10), min_size=18, max_size=18), st.floats(0, 5))
def test_no_order_waits_for_ever_and_all_that_is_needed_comes_before(
    case: tuple[str, int, int, int], speeds: list[float], sending: float
) -> None:
    found = timeline_of(orders(*case), lambda action: unit(action) * speeds[action.chunk], sending)
    ends = {span.action: (span.end, worker) for worker, own in enumerate(found) for span in own}
    assert tuple(tuple(span.action for span in own) for own in found) == orders(*case)
    for worker, own in enumerate(found):
        assert all(first.end <= second.begin for first, second in pairwise(own))
        for span in own:
            kind, piece, chunk = span.action.kind, span.action.piece, span.action.chunk
            before = {
                Kind.FORWARD: [Action(Kind.FORWARD, piece, chunk - 1)],
                Kind.WEIGHTS: [Action(Kind.INPUTS, piece, chunk)],
            }
            for one in before.get(kind, [Action(kind, piece, chunk + 1), Action(Kind.FORWARD, piece, chunk)]):
                end, where = ends.get(one, (0.0, worker))  # not there: before the first chunk, or behind the last
                assert end + (sending if where != worker else 0.0) <= span.begin


@settings(max_examples=300, deadline=None)
@given(cases)
def test_no_worker_holds_more_pieces_than_it_says(case: tuple[str, int, int, int]) -> None:
    schedule, stages, pieces, _ = case
    assert activation_counts(orders(*case)) == activation_counts_by_formula(*case)
    if schedule in ("1f1b", "pipedream"):
        assert all(count <= stages - worker for worker, count in enumerate(activation_counts(orders(*case))))
    if schedule == "zero-bubble":
        assert max(activation_counts(orders(*case))) == max(activation_counts(orders("1f1b", stages, pieces)))


@settings(max_examples=300, deadline=None)
@given(cases)
def test_the_formula_of_the_bubble_is_what_the_orders_give(case: tuple[str, int, int, int]) -> None:
    schedule, stages, pieces, chunks = case
    idle = idle_share(timeline_of(orders(*case), unit))
    if schedule != "pipedream":
        assert bubble(*case) == pytest.approx(idle, abs=1e-12)
    papers = {
        "naive": 1 - 1 / stages,
        "interleaved": (stages - 1) / (chunks * pieces + stages - 1),
        "zero-bubble": (stages - 1) / (3 * pieces + stages - 1),
    }
    if pieces >= stages:
        assert idle == pytest.approx(papers.get(schedule, (stages - 1) / (pieces + stages - 1)), abs=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_pipedream_is_never_idle_once_the_line_is_full(stages: int) -> None:
    found = timeline_of(orders("pipedream", stages, 40), unit)
    first = max(own[0].begin for own in found), min(own[-1].begin for own in found)
    full = first[0] + 3 * stages, first[1] - 3 * stages
    assert idle_share(found, full) == pytest.approx(bubble("pipedream", stages, 40), abs=1e-12) == 0
    assert idle_share(found) > 0 or stages == 1


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_weights_of_pipedream_move_as_often_between_forward_and_backward_as_it_says(stages: int) -> None:
    for stage, own in enumerate(orders("pipedream", stages, 20)):
        for piece in range(stages, 20):  # before, the line fills
            between = own[
                own.index(Action(Kind.FORWARD, piece, stage)) : own.index(Action(Kind.BACKWARD, piece, stage))
            ]
            assert sum(one.kind is Kind.BACKWARD for one in between) == staleness(stages, stage)


@settings(max_examples=200, deadline=None)
@given(cases)
def test_gradients_are_added_in_the_order_of_the_pieces_whatever_the_schedule(case: tuple[str, int, int, int]) -> None:
    adding = Kind.WEIGHTS if case[0] == "zero-bubble" else Kind.BACKWARD
    for own in orders(*case):
        for chunk in {one.chunk for one in own}:
            assert [one.piece for one in own if one.kind is adding and one.chunk == chunk] == list(range(case[2]))


@settings(max_examples=200, deadline=None)
@given(cases)
def test_what_is_sent_over_a_cut_arrives_in_the_order_in_which_it_is_taken(case: tuple[str, int, int, int]) -> None:
    found = orders(*case)
    last = len(found) * case[3] - 1

    def taken(kinds: tuple[Kind, ...], chunk: int) -> list[int]:
        return [one.piece for own in found for one in own if one.kind in kinds and one.chunk == chunk]

    assert all(
        taken(kinds, chunk) == taken(kinds, chunk + 1)
        for kinds in ((Kind.FORWARD,), BACKWARDS)
        for chunk in range(last)
    )


def sent_and_taken(
    found: Orders, chunks: int
) -> tuple[dict[tuple[int, int], list[Action]], dict[tuple[int, int], list[Action]]]:
    """By (from worker, to worker): what is computed for the other, and what the other takes, each in order."""
    sent, taken = defaultdict(list), defaultdict(list)
    stages = len(found)
    for worker, own in enumerate(found):
        for one in own:
            step = {Kind.FORWARD: 1, Kind.WEIGHTS: 0}.get(one.kind, -1)
            if step and 0 <= one.chunk + step < stages * chunks:
                sent[worker, (one.chunk + step) % stages].append(one)
            if step and 0 <= one.chunk - step < stages * chunks:
                taken[(one.chunk - step) % stages, worker].append(Action(one.kind, one.piece, one.chunk - step))
    return sent, taken


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_only_two_workers_that_interleave_take_things_in_another_order_than_they_are_sent(stages: int) -> None:
    for schedule in SCHEDULES:
        for chunks in (1, 2, 3) if schedule == "interleaved" else (1,):
            found = [sent_and_taken(orders(schedule, stages, pieces, chunks), chunks) for pieces in range(1, 13)]
            assert all(sent == taken for sent, taken in found) == (stages > 2 or chunks == 1), (schedule, chunks)


def test_orders_in_which_everybody_waits_are_told_of() -> None:
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    with pytest.raises(
        ValueError, match="worker 0 can't do B0 of chunk 0 before F0 of chunk 0, which worker 0 has yet to do"
    ):
        timeline_of(((backward, forward),), unit)
    with pytest.raises(ValueError, match="worker 0 can't do F0 of chunk 1 before F0 of chunk 0, which nobody does"):
        timeline_of(((Action(Kind.FORWARD, 0, 1),),), unit)
    crossed = ((forward, backward), (Action(Kind.BACKWARD, 0, 1), Action(Kind.FORWARD, 0, 1)))
    with pytest.raises(
        ValueError, match="worker 0 can't do B0 of chunk 0 before B0 of chunk 1, which worker 1 has yet to do, and"
    ):
        timeline_of(crossed, unit)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("gpip", 2, 4, 1), "there is no schedule 'gpip'.*did you mean gpipe?"),
        (("1f1b", 2, 4, 2), "only 'interleaved' takes several"),
        (("gpipe", 0, 4, 1), "stages=0"),
        (("gpipe", 2, 0, 1), "pieces=0"),
        (("interleaved", 2, 4, 0), "chunks=0"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(wrong: tuple[str, int, int, int], words: str) -> None:
    for asked in (orders, bubble, activation_counts_by_formula):
        with pytest.raises(Mistake, match=words):
            asked(*wrong)


def test_a_timeline_is_the_same_after_json() -> None:
    found = timeline_of(orders("zero-bubble", 3, 4), lambda action: unit(action) / 3, 0.1)
    assert from_json(Timeline, to_json(found)) == found
    assert to_json(((ActionSpan(Action(Kind.FORWARD, 1, 2), 0.5, 1.0),),)) == [
        [{"action": {"kind": "FORWARD", "piece": 1, "chunk": 2}, "begin": 0.5, "end": 1.0}]
    ]


def test_nobody_at_work_is_no_share_of_nothing() -> None:
    assert idle_share(((), ())) == 0.0
    assert idle_share(((ActionSpan(Action(Kind.FORWARD, 0, 0), 0.0, 1.0),), ())) == 0.5
