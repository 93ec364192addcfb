"""The report page: whole, small, self-contained, and safe with whatever the report says."""
from __future__ import annotations

from html.parser import HTMLParser
from math import exp, inf, nan
from typing import Any

import pytest

from shoestring.page import page

MIB = 1 << 20
VOID = {"meta", "br"}


def full() -> dict[str, Any]:
    layers = range(8)
    forward = [[f"forward layers.{layer}", (90 + 14 * layer) * MIB] for layer in layers]
    backward = [[f"backward layers.{layer}", (130 + 13 * layer) * MIB] for layer in reversed(layers)]
    return {
        "job": "gpt", "flags": {"width": 320, "layers": 8}, "run": "runs/20261115-gpt", "steps": 40,
        "losses": [2.3 + 3.2 * exp(-step / 12) + 0.05 * (step % 3) for step in range(40)],
        "budget": {"memory": 600 * MIB},
        "predicted": {"peak_bytes": 226 * MIB, "process_bytes": 548 * MIB, "step_seconds": 0.84},
        "measured": {"peak_bytes": 221 * MIB, "process_bytes": 531 * MIB, "step_seconds": 0.91,
                     "parts": {"activations": 88 * MIB, "parameters": 41 * MIB, "optimizer": 62 * MIB, "gradients": 21 * MIB,
                               "temporaries": 8 * MIB, "inputs": 1 * MIB, "buffers": 0}},
        "plain": {"peak_bytes": 890 * MIB, "process_bytes": 1229 * MIB, "step_seconds": 0.66},
        "techniques": [
            {"name": "Checkpoint", "knobs": {"every": 2}, "why": "activations are computed again instead of kept"},
            {"name": "Accumulate", "knobs": {"pieces": 2}, "why": "half the batch at a time, one update"}],
        "blocks": [*forward, *backward, ["update", 128 * MIB]],
        "runners_up": [
            {"text": "Accumulate(pieces=4)", "process_bytes": 571 * MIB, "step_seconds": 1.02, "lost": "12% slower"},
            {"text": "Checkpoint(every=1) + Accumulate(pieces=2)", "process_bytes": 498 * MIB, "step_seconds": 0.97,
             "lost": "7% slower, and the memory it saves isn't needed"},
            {"text": "Offload(optimizer)", "process_bytes": 640 * MIB, "step_seconds": 0.8, "lost": "40 MiB above the budget"}],
        "weights_sha256": "ab12" * 16, "exact": True,
        "shown": "ROMEO:\nWhat light & what <window> breaks?\n\nJULIET:\nIt is the east.",
        "sure": "one anchor step was measured, the rest is counted from its tensors",
        "samples_process": [[0.5 * tick, min(531, 240 + 30 * tick) * MIB - (tick % 2) * 9 * MIB] for tick in range(80)],
    }


class Nesting(HTMLParser):
    """Asserts that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def well_nested(text: str) -> bool:
    parser = Nesting()
    parser.feed(text)
    return not parser.open


def test_a_full_report_shows_every_section() -> None:
    text = page(full()).replace("&nbsp;", " ")
    assert well_nested(text)
    for words in ("Trained 40 steps inside 600 MiB; plain training would have needed 1.20 GiB.", "width 320", "+8.3 %",
                  "\N{MINUS SIGN}3.1 %", "69.0 MiB left", "Memory through one step", "budget 600 MiB",
                  "What the peak is made of", "Loss", "Memory over the run", "Checkpoint(every=2)",
                  "computed again", "12% slower", "&lt;window&gt;",
                  "runs/20261115-gpt", "ab12ab12", "anchor step"):
        assert words in text, words


def test_an_empty_report_still_makes_a_page() -> None:
    text = page({})
    assert well_nested(text)
    assert "Nothing was measured" in text
    assert "<table" not in text and "<svg" not in text


@pytest.mark.parametrize("key", sorted(full()))
@pytest.mark.parametrize("nothing", ["missing", "none", "empty"])
def test_any_one_thing_may_be_missing(key: str, nothing: str) -> None:
    report = full()
    empty = type(report[key])()
    report[key] = None if nothing == "none" else empty
    if nothing == "missing":
        del report[key]
    assert well_nested(page(report))


def test_whatever_the_report_says_is_text_and_never_markup() -> None:
    evil = '<script>"x"</script>'
    report = {**full(), "job": evil, "flags": {evil: evil}, "run": evil, "shown": evil, "sure": evil, "weights_sha256": evil,
              "techniques": [{"name": evil, "knobs": {evil: evil}, "why": evil}], "blocks": [[evil, 5], [f"forward {evil}", 6]],
              "runners_up": [{"text": evil, "lost": evil}], "measured": {"parts": {evil: 7}}}
    text = page(report)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert '"x"' not in text
    assert well_nested(text)


def test_a_run_above_its_budget_is_not_called_inside() -> None:
    report = full()
    report["measured"]["process_bytes"] = 700 * MIB
    text = page(report).replace("&nbsp;", " ")
    assert "inside" not in text
    assert "but reached 700 MiB, above the budget of 600 MiB" in text
    assert "100 MiB too much" in text


def test_the_highest_block_is_drawn_even_when_blocks_are_merged() -> None:
    blocks = [[f"forward {place}", MIB] for place in range(900)]
    blocks[451][1] = 77 * MIB
    text = page({"blocks": blocks})
    assert "<title>forward 451: 77.0 MiB</title>" in text
    assert text.count("<rect") <= 120


def test_losses_that_are_not_numbers_are_left_out_and_counted() -> None:
    text = page({"losses": [3.0, nan, 2.0, inf]})
    assert "2 losses were not numbers" in text
    assert "nan" not in text.split("<main>")[1] and "inf" not in text.split("<main>")[1]


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1e-9], [1e30, 1.0]])
def test_odd_loss_curves_are_drawn(losses: list[float]) -> None:
    text = page({"losses": losses})
    assert well_nested(text) and "<polyline" in text


def test_the_page_of_a_long_run_stays_under_100_kb() -> None:
    long = {**full(), "losses": [5.0] * 100_000, "shown": "word & " * 50_000, "runners_up": full()["runners_up"] * 100,
            "blocks": [[f"{phase} layers.{layer}", MIB] for phase in ("forward", "backward") for layer in range(500)],
            "samples_process": [[0.1 * tick, 5 * MIB] for tick in range(50_000)]}
    assert len(page(full()).encode()) < 40_000
    assert len(page(long).encode()) < 100_000


def test_nothing_is_fetched_from_anywhere() -> None:
    text = page(full()).replace("http://www.w3.org/2000/svg", "")
    for word in ("http://", "https://", "src=", "href=", "url(", "@import", "<script"):
        assert word not in text
