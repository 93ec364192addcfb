"""The timeline of a pipeline as text: small pictures, written out."""

from __future__ import annotations

from random import Random

import pytest

from shoestring.core.workers.actions import Action, ActionSpan, Kind, Timeline
from shoestring.show.terminal import Screen
from shoestring.show.timeline import IDLE, grid_of, rows, timeline_text
from shoestring.training.pipeline.schedule import orders, timeline_of

SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUTS: 1.0, Kind.WEIGHTS: 1.0}


def draw_text(timeline: Timeline, width: int) -> list[str]:
    return [row.text for row in rows(timeline, grid_of([timeline], width))]


def predicted(schedule: str, stages: int, pieces: int, chunks: int = 1) -> Timeline:
    return timeline_of(orders(schedule, stages, pieces, chunks), lambda action: SECONDS[action.kind] / chunks)


def measured(schedule: str, stages: int, pieces: int) -> Timeline:
    random = Random(0)
    return timeline_of(
        orders(schedule, stages, pieces), lambda action: SECONDS[action.kind] * random.uniform(0.9, 1.4), 0.05
    )


def test_one_worker_at_a_time() -> None:
    assert draw_text(predicted("naive", 3, 2), 45) == [
        "stage 0  F0············B0──F1············B1──",
        "stage 1  ··F0······B0──······F1······B1──····",
        "stage 2  ····F0B0──············F1B1──········",
    ]


def test_all_forwards_then_all_backwards() -> None:
    assert draw_text(predicted("gpipe", 3, 3), 40) == [
        "stage 0  F0F1F2············B0──B1──B2──",
        "stage 1  ··F0F1F2······B0──B1──B2──····",
        "stage 2  ····F0F1F2B0──B1──B2──········",
    ]


def test_a_forward_and_a_backward_in_turn() -> None:
    assert draw_text(predicted("1f1b", 3, 4), 45) == [
        "stage 0  F0F1F2········B0──F3B1──··B2──··B3──",
        "stage 1  ··F0F1····B0──F2B1──F3B2──··B3──····",
        "stage 2  ····F0B0──F1B1──F2B2──F3B3──········",
    ]


def test_backwards_to_weights_fill_the_end() -> None:
    assert draw_text(predicted("zero-bubble", 3, 4), 40) == [
        "stage 0  F0F1F2····I0W0F3I1W1I2W2I3W3",
        "stage 1  ··F0F1··I0F2I1W0F3I2W1I3W2W3",
        "stage 2  ····F0I0F1I1F2I2W0F3I3W1W2W3",
    ]


def test_chunks_of_a_worker_have_letters_where_there_is_room() -> None:
    assert draw_text(predicted("interleaved", 2, 2, 2), 65) == [
        "stage 0  F0aF1aF0bF1b······B0b───···B1b───B0a───B1a───",
        "stage 1  ···F0aF1aF0bB0b───F1bB1b───B0a───B1a───······",
    ]
    assert draw_text(predicted("interleaved", 2, 4, 2), 46) == [
        "stage 0  FFFFF·B0FB1FB0FB1·B2·B3B2B3",
        "stage 1  ·FFFB0FB1FB0FB1FB2FB3B2B3··",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "case", [("naive", 3, 2), ("gpipe", 4, 8), ("1f1b", 4, 8), ("zero-bubble", 6, 30), ("pipedream", 2, 300)]
)
def test_a_picture_is_as_wide_as_the_terminal_at_most_and_as_long_as_what_it_shows(
    case: tuple[str, int, int], width: int
) -> None:
    both = [predicted(*case), measured(*case)]
    grid = grid_of(both, width)
    lengths = [{sum(len(one.text) for one in row.stretches) for row in rows(timeline, grid)} for timeline in both]
    assert all(len(row.text) <= width for timeline in both for row in rows(timeline, grid))
    assert [len(one) for one in lengths] == [1, 1], "all workers of a timeline end in one column"
    spans = [max(span.end for own in timeline for span in own) for timeline in both]
    assert max(lengths[1]) / max(lengths[0]) == pytest.approx(spans[1] / spans[0], rel=0.05), "both are on one scale"


@pytest.mark.parametrize("pieces", [8, 64, 500])
def test_each_kind_has_its_share_of_columns_however_many_pieces_there_are(pieces: int) -> None:
    timeline = predicted("1f1b", 2, pieces)
    columns: dict[str, int] = {}
    for row in rows(timeline, grid_of([timeline], 120)):
        for one in row.stretches:
            columns[one.tone] = columns.get(one.tone, 0) + len(one.text)
    whole = sum(columns.values())
    assert columns["forward"] / whole == pytest.approx(pieces / (3 * pieces + 3), abs=0.02)
    assert columns.get(IDLE, 0) / whole == pytest.approx(1 / (pieces + 1), abs=0.02)


def test_of_many_workers_the_first_and_the_last_are_drawn() -> None:
    shown = draw_text(predicted("gpipe", 40, 4), 100)
    assert [line.split("  ")[0].strip() for line in shown] == [
        *(f"stage {worker}" for worker in range(8)),
        "...",
        *(f"stage {worker}" for worker in range(32, 40)),
    ]


def test_the_measured_timeline_stands_under_the_predicted_one() -> None:
    lines = timeline_text(predicted("1f1b", 2, 3), measured("1f1b", 2, 3), Screen(90)).splitlines()
    assert lines[0] == "predicted: 12 s, 25 % idle"
    assert lines[3].startswith("measured: ") and lines[3].endswith(" % idle")
    assert [line[:7] for line in lines] == ["predict", "stage 0", "stage 1", "measure", "stage 0", "stage 1", "F forwa"]
    assert lines[-1] == "F forward, B backward, each with the number of its piece, · idle"
    assert timeline_text(predicted("zero-bubble", 2, 3)).splitlines()[-1] == (
        "F forward, I backward to inputs, W backward to weights, each with the number of its piece, · idle"
    )


def test_idle_time_has_a_colour_of_its_own_in_a_terminal_that_has_colours() -> None:
    text = timeline_text(predicted("1f1b", 2, 3), screen=Screen(80, colour=True))
    assert "\x1b[31m···" in text and "\x1b[37;44mF0" in text and "\x1b[30;43mB0" in text
    assert "\x1b" not in timeline_text(predicted("1f1b", 2, 3), screen=Screen(80))


def test_a_timeline_that_begins_late_is_drawn_from_its_begin() -> None:
    late = tuple(
        tuple(ActionSpan(span.action, span.begin + 1e9, span.end + 1e9) for span in own)
        for own in predicted("gpipe", 2, 2)
    )
    assert draw_text(late, 60) == draw_text(predicted("gpipe", 2, 2), 60)


def test_nothing_to_draw_is_drawn_as_nothing() -> None:
    assert draw_text(((), ()), 60) == ["stage 0  ", "stage 1  "]
    assert (
        timeline_text(((ActionSpan(Action(Kind.FORWARD, 0, 0), 0.0, 0.0),),)).splitlines()[0]
        == "predicted: 0 ms, 0 % idle"
    )
