"""The page of a compressed model: predicted beside measured, the frontier with what was chosen of it, and every layer."""

from __future__ import annotations

import json
import re
from html import unescape
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from shoestring.compression.report.compress_report import CompressReport
from shoestring.compression.report.frontier_section import box_of, frontier
from shoestring.compression.report.sections import compression_page
from shoestring.compression.run import draw_page
from shoestring.core.files.codec import Unreadable, finite_json, from_json
from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import report_of
from shoestring.show.page.drawings.drawing import BOTTOM, LEFT, RIGHT, TOP
from tests.show.made_runs import append
from tests.show.page.test_document import well_nested

NASTY = '<b>x</b><script>alert(1)</script> & "it" \ud800'
PARTS = {
    "attention.self.query": (384, 384),
    "attention.self.key": (384, 384),
    "attention.self.value": (384, 384),
    "attention.output.dense": (384, 384),
    "intermediate.dense": (1536, 384),
    "output.dense": (384, 1536),
}


def made_layers() -> list[dict[str, Any]]:
    """MiniLM's weights by their real names, with made-up bits and damages: the page is looked at, not the model."""
    shapes = {"embeddings.word_embeddings.weight": (30522, 384), "embeddings.position_embeddings.weight": (512, 384)}
    shapes |= {f"encoder.layer.{layer}.{part}.weight": shape for layer in range(6) for part, shape in PARTS.items()}
    found = []
    for place, (name, (rows, columns)) in enumerate(shapes.items()):
        bits = 4.25 if place % 3 else 6.25
        found.append(
            {
                "name": name,
                "technique": "Quantize",
                "form": "groups",
                "bits": bits,
                "bytes": int(rows * columns * bits / 8),
                "shape": [rows, columns],
                "damage": 2e-5 * (1 + place * 7 % 11) * (0.3 if bits > 5 else 1),
            }
        )
    return [
        *found,
        {
            "name": "embeddings.LayerNorm.weight",
            "technique": "",
            "form": "plain",
            "bits": 32.0,
            "bytes": 1536,
            "shape": [384],
            "damage": 0.0,
        },
    ]


def told(**more: Any) -> dict[str, Any]:
    sizes = [8.1e6 * (90.9 / 8.1) ** (place / 23) for place in range(24)]
    return {
        "folder": "runs/minilm-compressed",
        "size_bytes": {"predicted": 15_780_312, "measured": 15_780_312},
        "memory_bytes": {"predicted": 16_200_000, "measured": 16_200_000},
        "latency_ms": {"p50": {"predicted": 11.6, "measured": 12.0}, "p99": {"predicted": 14.4, "measured": 15.3}},
        "fidelity": {
            "by": "cosine",
            "n": 1024,
            "output": "boxes",
            "mean": {"predicted": 0.99858, "measured": 0.9984},
            "outputs": [
                {
                    "name": "boxes",
                    "by": "r2",
                    "why": "the loss calls l1_loss",
                    "samples": 1024,
                    "mean": {"measured": 0.9984},
                    "worst": {"measured": 0.9907},
                }
            ],
            "worst": {"predicted": 0.9921, "measured": 0.9907},
        },
        "metric": {
            "accuracy": {
                "original": 0.9121,
                "predicted": 0.911,
                "measured": 0.9102,
                "n": 1024,
                "of": "samples",
                "standard_error": 0.0089,
                "interval": [0.891, 0.926],
            }
        },
        "techniques": [
            {"name": "Quantize", "knobs": {"bits": None, "group": 64}, "why": "2 to 8 bits a weight, rounded by GPTQ"},
            {"name": "Half", "knobs": {}, "why": "norms and biases in 16 bits: no damage that can be seen"},
        ],
        "plain": {"size_bytes": 90_868_376, "latency_ms": {"p50": 41.3, "p99": 52.0}},
        "layers": made_layers(),
        "frontier": [{"size_bytes": size, "damage": 0.06 * (8.1e6 / size) ** 5, "latency_ms": 12.0} for size in sizes],
        "notes": ["the job has no unlabelled texts: a quarter of the validation set was held back for calibration"],
        "files": ["model.safetensors", "manifest.json"],
        "asked": {"size": 16_000_000, "quality": 0.998, "latency": 0.02},
        **more,
    }


def made_report(**more: Any) -> CompressReport:
    return read(told(**more))


def read(found: dict[str, Any]) -> CompressReport:
    return from_json(CompressReport, finite_json(found))


def main_of(text: str) -> str:
    return text.partition("<main>")[2].partition("</main>")[0]


def words_of(text: str) -> str:
    """What a person reads."""
    shown = main_of(text)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", shown)).replace("\xa0", " "))


def section(text: str, title: str) -> str:
    return text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]


def test_a_full_report_says_everything() -> None:
    text = compression_page(made_report(healed={"seconds": 598.0, "steps": 900, "before": 0.962, "after": 0.9751}))
    assert well_nested(text)
    words = words_of(text)
    for said in (
        "15.8 MB of 90.9 MB, fidelity .9984, 12 ms an answer",
        "Compressed minilm-compressed",
        "size 16 MB",
        "keep .998",
        "latency 20 ms",
        "5.8x smaller",
        "3.4x faster",
        "worst .9907",
        "on 1,024 answers that nothing was chosen by",
        "Size on disk 15.8 MB 15.8 MB as predicted 90.9 MB",
        "An answer, 99 of 100 14.4 ms 15.3 ms 6.2 % above 52 ms",
        "Fidelity, mean .9986 .9984 damage 13 % above 1",
        "accuracy .9121 .9102 .891 to .926 1,024 samples",
        "boxes r2; the loss calls l1_loss .9984 .9907 1,024 samples",
        "chosen, predicted: 15.8 MB, damage .00142, 11.6 ms an answer",
        "measured: 15.8 MB, damage .0016, 12 ms an answer",
        "asked for: 16 MB, fidelity .998",
        "Quantize(bits=None, group=64)",
        "rounded by GPTQ",
        "39 weights, by the damage",
        "_embeddings.weight 30522 \N{MULTIPLICATION SIGN} 384 Quantize groups 6.25 9.16 MB",
        "as it is 32 1.54 kB 0",
        "fidelity .9620 before, .9751 after",
        "a quarter of the validation set",
        "model.safetensors",
    ):
        assert said in words, said
    assert "asked for." not in words  # nothing was missed


def test_sections_come_in_the_order_in_which_one_asks() -> None:
    found = re.findall(
        "<h2>(.*?)</h2>", compression_page(made_report(healed={"seconds": 5, "steps": 1, "before": 0.9, "after": 0.95}))
    )
    assert found == ["Predicted and measured", "The frontier", "The plan", "Healing", "Layer by layer", "Notes"]


def test_nothing_is_fetched_and_no_script_or_style_is_allowed_but_its_own() -> None:
    text = compression_page(made_report())
    for word in ("http://", "https://", "src=", "href=", "url(", "@import", "style=", "onclick"):
        assert word not in text, word
    assert "default-src 'none'; style-src 'sha256-" in text and "<script></script>" in text


def test_names_can_not_be_markup() -> None:
    report = made_report(
        folder=NASTY,
        notes=[NASTY],
        files=[NASTY],
        missed=[NASTY],
        asked={NASTY: NASTY},
        metric={NASTY: {"measured": 1.0}},
        techniques=[{"name": NASTY, "knobs": {NASTY: NASTY}, "why": NASTY}],
        layers=[{"name": NASTY, "technique": NASTY, "form": NASTY, "shape": [3]}],
    )
    text = compression_page(report)
    text.encode()
    assert well_nested(text) and "<b>x" not in text and "<script>alert" not in text and text.count("&lt;b&gt;x") >= 11


def test_what_was_asked_for_and_missed_is_told() -> None:
    words = words_of(compression_page(made_report(missed=["measured on unseen data, size is 15.8 MB"])))
    assert "measured on unseen data, size is 15.8 MB" in words and "Not what was asked for" in words
    assert "Not what was asked for" not in words_of(compression_page(made_report()))


@pytest.mark.parametrize(
    ("asked", "over"),
    [({"size": 15e6}, "15.8 MB"), ({"quality": 0.999}, ".9984"), ({"latency": 0.015}, "15.3 ms"), ({}, "")],
)
def test_a_figure_beyond_its_limit_is_red(asked: dict[str, float], over: str) -> None:
    found = re.findall('class="over">([^<]*)<', compression_page(made_report(asked=asked)))
    assert [one.replace("\xa0", " ") for one in found] == [over] * bool(over)


def test_what_was_not_measured_is_not_said_to_be() -> None:
    report = made_report(
        size_bytes={"predicted": 5e6}, fidelity={"mean": {"predicted": 0.99}}, latency_ms={}, metric={}, memory_bytes={}
    )
    words = words_of(compression_page(report))
    assert "Predicted, not measured: 5.00 MB of 90.9 MB, fidelity .9900" in words and "Compressed minilm" not in words


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a report, of lists the first entry alone."""
    below = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value[:1]))
        if isinstance(value, list)
        else []
    )
    return [path] * bool(path) + [way for key, one in below for way in leaves(one, (*path, key))]


ODD = (None, nan, 1e300, -1e300, 10**400, 0, 1e-300, "words", [inf], {"predicted": 1e300, "measured": -1e300})


@pytest.mark.parametrize("odd", ODD, ids=lambda one: str(one)[:20])
def test_any_one_thing_may_be_odd(odd: object) -> None:
    """What does not fit is told with its place; what fits is drawn, however odd."""
    small = told(healed={"seconds": 5.0, "steps": 3, "before": 0.9, "after": 0.95})
    small |= {name: small[name][:2] for name in ("layers", "frontier", "techniques")}
    for path in leaves(small):
        report = json.loads(json.dumps(small))
        inside = report
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = odd
        try:
            found = read(report)
        except Unreadable as error:
            assert str(path[0]) in str(error) or odd is None, path
            continue
        text = compression_page(found)
        assert well_nested(main_of(text)) and len(text) < 60_000, path
        assert not re.search(
            r"\b(nan|None|\d{30,})\b", section(text, "Predicted and measured") + section(text, "The frontier")
        ), path


def test_a_report_that_can_not_be_read_makes_a_page_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    Folder(path).write("run.json", {"job": "minilm.py", "room": "compression"})
    append(
        path, [{"event": "begun", "time": 1.0, "steps": 1, "step": 0}, {"event": "finished", "time": 2.0, "step": 1}]
    )
    Folder(path).write("report.json", told(layers=[{"name": 3}]))
    report = report_of(path)
    assert report.of_room is None and "CompressReport.layers[0].name is 3" in report.damage[0]
    assert "CompressReport.layers[0].name is 3" in draw_page(report)


@pytest.mark.parametrize("key", sorted(told()))
def test_any_one_thing_may_be_missing(key: str) -> None:
    report = told()
    del report[key]
    assert well_nested(compression_page(read(report)))


def test_an_empty_report_makes_a_page() -> None:
    text = compression_page(CompressReport())
    assert well_nested(text) and "Nothing is known of this compression" in text and "<h2>" not in text


def test_of_many_layers_the_most_damaged_are_shown_and_the_rest_counted() -> None:
    layers = [
        {
            "name": f"layer.{place}" + "&" * 500,
            "technique": "Quantize",
            "form": "groups",
            "bits": 4.2,
            "bytes": 1000,
            "shape": [10, 200],
            "damage": place / 1e6 if place != 7 else None,
        }
        for place in range(5000)
    ]
    report = made_report(
        layers=layers,
        notes=["&" * 10_000] * 500,
        frontier=told()["frontier"] * 500,
        metric={f"{place}" + "&" * 500: {"measured": 1.0} for place in range(500)},
    )
    text = compression_page(report)
    assert len(text.encode()) < 250_000
    found = [int(place) for place in re.findall(r">layer\.(\d+)", text)]
    assert found == list(range(4999, 4799, -1))
    assert "and 4,800 more with 4.80 MB and damage 11.5 in all" in words_of(text) and "5,000 weights" in words_of(text)


def test_bars_are_shares_of_the_greatest() -> None:
    amounts = ((100, 0.002), (400, 0.001), (0, 0.0))
    layers = [{"name": "a", "bytes": size, "damage": damage} for size, damage in amounts]
    text = section(compression_page(read({"layers": layers})), "Layer by layer")
    found = re.findall(r'tone-(\w+)" width="([\d.]+)"', text)
    assert found == [("forward", "25.0"), ("backward", "100.0"), ("forward", "100.0"), ("backward", "50.0")]


# The frontier


def test_points_are_where_their_logarithms_say() -> None:
    plotted = frontier(made_report(asked={}))
    assert plotted is not None and plotted.rows_name == "damage (1 - fidelity)" and plotted.columns_name == "size in MB"
    xs, ys = zip(*(one.place for one in plotted.dots), strict=True)
    assert len(xs) == 24 and list(xs) == sorted(xs) and list(ys) == sorted(ys)  # more bytes, less damage: further down
    steps = [(right - left, low - high) for left, right, high, low in zip(xs, xs[1:], ys, ys[1:], strict=False)]
    assert all(
        abs(x - steps[0][0]) < 0.3 and abs(y - steps[0][1]) < 0.3 for x, y in steps
    )  # a power law is a straight line
    assert [mark.text for mark in plotted.columns] == [
        "10",
        "20",
        "50",
        "100",
    ] and "Both scales are logarithmic" in plotted.note
    places = dict(plotted.markers)
    assert (
        places["measured"].place[0] == places["predicted"].place[0]
        and places["measured"].place[1] < places["predicted"].place[1]
    )


def test_sizes_that_are_near_each_other_are_on_an_even_scale() -> None:
    plotted = frontier(read({"frontier": [{"size_bytes": size, "damage": 1e-3} for size in (10e6, 15e6, 20e6)]}))
    assert plotted is not None
    first, middle, last = (one.place[0] for one in plotted.dots)
    assert abs((first + last) / 2 - middle) < 0.2 and "The scale of damages is logarithmic" in plotted.note


def test_no_damage_is_the_lowest_line() -> None:
    points = ((1e6, 0.1), (2e6, 0.001), (4e6, 0.0), (5e6, -1e-8))
    plotted = frontier(read({"frontier": [{"size_bytes": size, "damage": damage} for size, damage in points]}))
    assert plotted is not None and plotted.rows[0].text == "0" and "The lowest line is no damage at all" in plotted.note
    heights = [one.place[1] for one in plotted.dots]
    assert heights[2] == heights[3] == plotted.rows[0].at == BOTTOM and heights[1] < BOTTOM - 10


def test_without_any_damage_fidelity_is_drawn() -> None:
    plotted = frontier(read({"frontier": [{"size_bytes": 1e6 * size, "damage": 0.0} for size in (1, 2)]}))
    assert plotted is not None and plotted.rows_name == "fidelity"
    assert {one.place[1] for one in plotted.dots} == {TOP} and [mark.text for mark in plotted.rows] == ["0", ".5", "1"]


def test_what_was_asked_for_is_a_line_and_what_was_not_is_none() -> None:
    both, none = frontier(made_report()), frontier(made_report(asked={"latency": 0.01}))
    assert both is not None and none is not None and dict(none.across) == {}
    lines, places = dict(both.across), dict(both.markers)
    assert lines["size"] > places["measured"].place[0] and lines["damage"] < places["measured"].place[1]


def test_points_that_are_no_numbers_are_left_out_and_told() -> None:
    plotted = frontier(
        read(
            {
                "frontier": [
                    {"size_bytes": 1e6, "damage": 0.1},
                    {"size_bytes": 1e300, "damage": 0.1},
                    {"size_bytes": 0.0, "damage": 0.1},
                ]
            }
        )
    )
    assert (
        plotted is not None and len(plotted.dots) == 1 and "2 of its points are no numbers and left out" in plotted.note
    )
    assert frontier(read({"frontier": [{"size_bytes": 1e300, "damage": 0.1}]})) is None


@pytest.mark.parametrize("measured", [0.5, 0.9, 0.97, 0.99, 0.998, 0.9984, 0.99858, 0.9999, 1.0])
@pytest.mark.parametrize("size", [8.1e6, 15.8e6, 90e6])
def test_words_lie_inside_and_over_no_others_wherever_the_points_are(measured: float, size: float) -> None:
    for asked in (
        {},
        {"size": size * 1.01},
        {"quality": measured},
        {"size": size, "quality": 0.998},
        {"size": 4e6, "quality": 0.9999},
    ):
        plotted = frontier(
            made_report(
                size_bytes={"predicted": size, "measured": size * 0.999},
                asked=asked,
                fidelity={"mean": {"predicted": 0.99858, "measured": measured}},
            )
        )
        assert plotted is not None
        boxes = [box_of(word.text, word.x, word.y, word.anchor) for word in plotted.words]
        assert {word.text for word in plotted.words} >= {"measured", "predicted"}
        for place, (left, top, right, bottom) in enumerate(boxes):
            assert left >= LEFT - 1 and right <= RIGHT + 5 and bottom <= BOTTOM + 1
            assert not any(
                left < other[2] - 0.2 and other[0] < right - 0.2 and top < other[3] - 0.2 and other[1] < bottom - 0.2
                for other in boxes[place + 1 :]
            )
