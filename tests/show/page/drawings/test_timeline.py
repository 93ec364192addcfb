"""The timeline of a pipeline as SVG: what is in it, read back from the markup."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from shoestring.core.workers.actions import Action, ActionSpan, Kind, Timeline, idle_share
from shoestring.show.page.drawings.timeline import LEFT, MOST_ROWS, RIGHT, WIDTH, timeline_section, timeline_svg
from tests.show.test_timeline import measured, predicted

CASES = [("naive", 3, 2), ("gpipe", 4, 8), ("1f1b", 3, 5), ("1f1b", 4, 30), ("zero-bubble", 4, 8), ("1f1b", 2, 500)]
Boxes = dict[float, list[tuple[float, float, str]]]  # y -> (left, right, classes), in order


def boxes_in(markup: str) -> Boxes:
    found: Boxes = defaultdict(list)
    for one in ElementTree.fromstring(markup).iter():
        classes = one.get("class", "")
        if one.tag == "rect":
            left = float(one.attrib["x"])
            found[float(one.attrib["y"])].append((left, left + float(one.attrib["width"]), classes))
        elif one.tag == "path" and "filled" in classes:
            for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v20h-[\d.]+z", one.attrib["d"]):
                found[float(y)].append((float(x), float(x) + float(width), classes))
    return {y: sorted(found[y]) for y in sorted(found)}


def words_in(markup: str, kind: str = "text") -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(markup).iter(kind)]


@pytest.mark.parametrize("case", CASES)
def test_every_row_is_filled_from_begin_to_end_without_overlap(case: tuple[str, int, int]) -> None:
    for row in boxes_in(timeline_svg(predicted(*case))).values():
        assert row[0][0] == LEFT and row[-1][1] == pytest.approx(RIGHT, abs=0.11)
        assert all(left[1] == pytest.approx(right[0], abs=0.11) for left, right in pairwise(row))


@pytest.mark.parametrize("case", CASES)
def test_the_red_part_of_the_picture_is_the_idle_share(case: tuple[str, int, int]) -> None:
    both = [predicted(*case), measured(*case)]
    rows = list(boxes_in(timeline_svg(*both)).values())
    for place, timeline in enumerate(both):
        own = [box for row in rows[place * case[1] : (place + 1) * case[1]] for box in row]
        red = sum(right - left for left, right, classes in own if "idle" in classes)
        assert red / sum(right - left for left, right, _ in own) == pytest.approx(idle_share(timeline), abs=0.02)


def test_every_action_is_a_box_with_its_piece_and_tells_what_it_is() -> None:
    markup = timeline_svg(predicted("1f1b", 2, 3))
    assert [[classes for *_, classes in row] for row in boxes_in(markup).values()] == [
        [
            f"box {tone}"
            for tone in (
                "tone-forward",
                "tone-forward",
                "tone-alert idle",
                "tone-backward",
                "tone-forward",
                "tone-backward",
                "tone-alert idle",
                "tone-backward",
            )
        ],
        [f"box {tone}" for tone in ("tone-alert idle", *("tone-forward", "tone-backward") * 3, "tone-alert idle")],
    ]
    assert sorted(word for word in words_in(markup) if word.isdigit()) == sorted(
        "0" + 4 * "012"
    )  # and where the axis begins
    assert "backward of piece 2, 10 s to 12 s" in words_in(markup, "title") and "idle, 2 s to 4 s" in words_in(
        markup, "title"
    )
    assert words_in(markup, "title")[0] == "Timeline of 2 stages. Predicted: 12 s, 25 % idle"


def test_the_measured_timeline_is_below_the_predicted_one_on_the_same_axis() -> None:
    both = predicted("gpipe", 3, 4), measured("gpipe", 3, 4)
    markup = timeline_svg(*both)
    rows = list(boxes_in(markup).values())
    long = [max(span.end for own in one for span in own) for one in both]
    assert [word for word in words_in(markup) if "idle" in word] == [
        "Predicted: 18 s, 33 % idle",
        f"Measured: {long[1]:.3g} s, {100 * idle_share(both[1]):.0f} % idle",
    ]
    assert len(rows) == 6 and rows[3][-1][1] == pytest.approx(RIGHT, abs=0.1)
    assert (rows[0][-1][1] - LEFT) / (RIGHT - LEFT) == pytest.approx(long[0] / long[1], abs=1e-3)


def test_halves_of_a_backward_and_chunks_of_a_worker_look_different() -> None:
    drawn = boxes_in(timeline_svg(predicted("zero-bubble", 2, 4)))
    assert {"box tone-backward", "box tone-update"} < {classes for row in drawn.values() for *_, classes in row}
    for word in ("backward to inputs", "backward to weights"):
        assert word in timeline_svg(predicted("zero-bubble", 2, 4)) and word not in timeline_svg(
            predicted("1f1b", 2, 4)
        )
    assert "tone-forward later" in timeline_svg(predicted("interleaved", 2, 4, 2)) and "later" not in timeline_svg(
        predicted("1f1b", 2, 4)
    )


@pytest.mark.parametrize(("stages", "pieces"), [(2, 8), (4, 8), (8, 16), (8, 40), (3, 2000), (64, 64)])
def test_a_picture_stays_small_and_inside_its_frame(stages: int, pieces: int) -> None:
    markup = timeline_svg(predicted("1f1b", stages, pieces), measured("1f1b", stages, pieces))
    assert len(markup.encode()) < 60_000
    rows = boxes_in(markup)
    assert len(rows) == 2 * min(stages, MOST_ROWS) and all(
        right <= WIDTH for row in rows.values() for _, right, _ in row
    )
    assert ("8 of 64 stages are drawn" in markup) == (stages == 64)


def test_a_section_has_the_picture_and_a_note_that_can_not_be_markup() -> None:
    markup = timeline_section(predicted("1f1b", 2, 3), note="<script>alert(1)</script>")
    assert "&lt;script&gt;" in markup and "<script" not in markup and "<svg" in markup and "style=" not in markup
    assert timeline_section(()) == timeline_section(((), ())) == ""


def test_what_takes_no_time_is_drawn_as_nothing() -> None:
    nothing: Timeline = ((ActionSpan(Action(Kind.FORWARD, 0, 0), 1.0, 1.0),),)
    assert boxes_in(timeline_svg(nothing)) == {}
    assert "Measured: 0 ms" in timeline_svg(predicted("gpipe", 1, 1), nothing)
