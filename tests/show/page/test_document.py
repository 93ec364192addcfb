"""The report page: whole, small, self-contained, and safe with whatever the report says."""

from __future__ import annotations

from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from math import exp, inf, nan
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import report_of
from shoestring.show.page import content, from_packages, guarded_section, page
from shoestring.show.page.overview import curves, overview, summary
from tests.show.made_reports import made_report
from tests.show.made_runs import PLAN, add, made_run

MIB = 1 << 20
VOID = {"meta", "br", "input"}


def full() -> dict[str, Any]:
    layers = range(8)
    forward = [[f"forward layers.{layer}", (90 + 14 * layer) * MIB] for layer in layers]
    backward = [[f"backward layers.{layer}", (130 + 13 * layer) * MIB] for layer in reversed(layers)]
    return {
        "job": "gpt",
        "flags": {"width": 320, "layers": 8},
        "run": "runs/20261115-gpt",
        "steps": 40,
        "losses": [2.3 + 3.2 * exp(-step / 12) + 0.05 * (step % 3) for step in range(40)],
        "budget": {"memory": 600 * MIB},
        "predicted": {"peak_bytes": 226 * MIB, "process_bytes": 548 * MIB, "step_seconds": 0.84},
        "measured": {
            "peak_bytes": 221 * MIB,
            "process_bytes": 531 * MIB,
            "step_seconds": 0.91,
            "parts": {
                "activations": 88 * MIB,
                "parameters": 41 * MIB,
                "optimizer": 62 * MIB,
                "gradients": 21 * MIB,
                "temporaries": 8 * MIB,
                "inputs": 1 * MIB,
                "buffers": 0,
            },
        },
        "plain": {"peak_bytes": 890 * MIB, "process_bytes": 1229 * MIB, "step_seconds": 0.66},
        "techniques": [
            {"name": "Checkpoint", "knobs": {"every": 2}, "why": "activations are computed again instead of kept"},
            {"name": "Accumulate", "knobs": {"pieces": 2}, "why": "half the batch at a time, one update"},
        ],
        "blocks": [*forward, *backward, ["update", 128 * MIB]],
        "runners_up": [
            {"text": "Accumulate(pieces=4)", "process_bytes": 571 * MIB, "step_seconds": 1.02, "lost": "12% slower"},
            {
                "text": "Checkpoint(every=1) + Accumulate(pieces=2)",
                "process_bytes": 498 * MIB,
                "step_seconds": 0.97,
                "lost": "7% slower, and the memory it saves isn't needed",
            },
            {
                "text": "Offload(optimizer)",
                "process_bytes": 640 * MIB,
                "step_seconds": 0.8,
                "lost": "40 MiB above the budget",
            },
        ],
        "weights_sha256": "ab12" * 16,
        "exactness": "to rounding",
        "shown": "ROMEO:\nWhat light & what <window> breaks?\n\nJULIET:\nIt is the east.",
        "basis": "one anchor step was measured, the rest is counted from its tensors",
        "state_of_techniques": {
            "pushes": {
                "corrected": True,
                "staleness": {"0": 60, "1": 20, "10": 20},
                "applied": {"1": 70, "2": 30},
                "dropped": {"2": 4},
            }
        },
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
    text = page(made_report(full())).replace("&nbsp;", " ")
    assert well_nested(text)
    for words in (
        "Trained 40 steps inside 600 MiB; plain training would have needed 1.20 GiB.",
        "width 320",
        "8.3 % above",
        "3.1 % below",
        "69.0 MiB left",
        "Memory through one step",
        "budget 600 MiB",
        "What the peak is made of",
        "Loss",
        "Memory while training",
        "Checkpoint(every=2)",
        "computed again",
        "12% slower",
        "&lt;window&gt;",
        "runs/20261115-gpt",
        "ab12ab12",
        "anchor step",
        "100 gradients moved the weights, computed on weights that were 2.2 versions old on average and 10 at most. "
        "The correction was on: the rate of a step was divided",
        "<td>30</td><td>4</td>",
    ):
        assert words in text, words


def test_an_empty_report_still_makes_a_page() -> None:
    text = page(made_report({}))
    assert well_nested(text)
    assert "Nothing was measured" in text
    assert "<table" not in text and "<svg" not in text


@pytest.mark.parametrize("key", sorted(full()))
@pytest.mark.parametrize("nothing", ["missing", "empty"])
def test_any_one_thing_may_be_missing(key: str, nothing: str) -> None:
    report = full()
    empty = type(report[key])()
    report[key] = empty
    if nothing == "missing":
        del report[key]
    assert well_nested(page(made_report(report)))


def test_whatever_the_report_says_is_text_and_never_markup() -> None:
    evil = '<script>"x"</script>'
    report = {
        **full(),
        "job": evil,
        "flags": {evil: evil},
        "run": evil,
        "shown": evil,
        "basis": evil,
        "weights_sha256": evil,
        "techniques": [{"name": evil, "knobs": {evil: evil}, "why": evil}],
        "metrics": [{"step": 1, evil: 0.5}],
        "blocks": [[evil, 5], [f"forward {evil}", 6]],
        "runners_up": [{"text": evil, "lost": evil}],
        "measured": {"parts": {evil: 7}},
    }
    text = page(made_report(report))
    said = text.split("<main>")[1].split("</main>")[0]
    assert "<script" not in said and "&lt;script&gt;" in said and text.count("<script") == 1
    assert '"x"' not in said and '"x"' not in text.split("<style>")[0]
    assert well_nested(text)


ODD: tuple[Any, ...] = (
    None,
    3,
    -1,
    10**400,
    1e300,
    nan,
    inf,
    "words",
    [],
    [None],
    {},
    {"a": None},
    ["x", 3],
    [[1, 2]],
    True,
)


@pytest.mark.parametrize("odd", ODD, ids=lambda one: str(one)[:20])
@pytest.mark.parametrize(
    "key", ["chosen", "peak_bytes", "details", "plain", "techniques", "blocks", "runners_up", "basis"]
)
def test_an_odd_entry_of_a_plan_is_told_as_damage_and_the_page_is_drawn(key: str, odd: Any, tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=5)
    chosen = PLAN["chosen"]
    changed = (
        {key: odd}
        if key in PLAN
        else {"chosen": {**chosen, "details": {**chosen["details"], key: odd}}}
        if key in chosen["details"]
        else {"chosen": {**chosen, key: odd}}
    )
    Folder(path).write("plan.json", {**PLAN, **changed})
    report = report_of(path)
    text = page(report)
    assert well_nested(text) and "Step" in text.replace("step", "Step") and report.step == 5
    assert all("plan.json" in one for one in report.damage)
    if key == "blocks" and odd is None:
        assert "PlanSummary.blocks is None, not list" in report.damage[0] and "is damaged" in text


@pytest.mark.parametrize("odd", ODD, ids=lambda one: str(one)[:20])
@pytest.mark.parametrize("key", ["weights_sha256", "shown", "state_of_techniques", "pushes", "staleness", "corrected"])
def test_an_odd_entry_of_a_report_is_told_as_damage_and_the_page_is_drawn(key: str, odd: Any, tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=5)
    add(path, "finished", step=5)
    states = full()["state_of_techniques"]
    told = {"weights_sha256": "ab", "shown": "text", "state_of_techniques": states}
    inside = told if key in told else states if key == "pushes" else states["pushes"]
    inside[key] = odd
    Folder(path).write("report.json", told)
    report = report_of(path)
    assert well_nested(page(report)) and all("report.json" in one for one in report.damage)
    assert None in (report.result, report.of_room) or not report.damage


def test_many_ages_of_gradients_become_one_row_and_the_correction_is_told() -> None:
    told = {"staleness": {str(age): 2 for age in range(900)}, "applied": {"1": 1800}}
    off, drop = (
        page(made_report({"state_of_techniques": {"pushes": told | {"corrected": corrected}}}))
        for corrected in (False, None)
    )
    assert "<span>12 or more</span><b>1,776</b>" in off and off.count("<rect") == 13
    assert "The correction was off" in off and "came too late were dropped" in drop


def test_a_run_above_its_budget_is_not_called_inside() -> None:
    report = full()
    report["measured"]["process_bytes"] = 700 * MIB
    text = content(made_report(report)).replace("&nbsp;", " ")
    assert "inside" not in text
    assert "but reached 700 MiB, above the budget of 600 MiB" in text
    assert "100 MiB too much" in text


def test_the_highest_block_is_drawn_even_when_blocks_are_merged() -> None:
    blocks = [[f"forward {place}", MIB] for place in range(900)]
    blocks[451][1] = 77 * MIB
    text = page(made_report({"blocks": blocks}))
    assert "<title>forward 451: 77.0 MiB</title>" in text
    assert text.count("<rect") <= 120


def test_losses_that_are_not_numbers_are_left_out_and_counted() -> None:
    text = page(made_report({"losses": [3.0, nan, 2.0, inf]}))
    assert "2 losses were not numbers" in text
    main = text.split("<main>")[1].split("</main>")[0].lower()
    assert "nan" not in main and "inf" not in main and "&#34;y&#34;:[3,null,2,null]" in main


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1e-9], [1e30, 1.0]])
def test_odd_loss_curves_are_drawn(losses: list[float]) -> None:
    text = page(made_report({"losses": losses}))
    assert well_nested(text) and "<polyline" in text


def test_the_page_of_a_long_run_stays_under_150_kb() -> None:
    long = {
        **full(),
        "losses": [5.0] * 100_000,
        "shown": "word & " * 50_000,
        "runners_up": full()["runners_up"] * 100,
        "blocks": [[f"{phase} layers.{layer}", MIB] for phase in ("forward", "backward") for layer in range(500)],
        "samples_process": [[0.1 * tick, 5 * MIB] for tick in range(50_000)],
    }
    steps = {
        "rates": [1e-3] * 5000,
        "norms": [1 / step for step in range(1, 5001)],
        "seconds": [0.123456] * 5000,
        "losses": [3 + 1 / step for step in range(1, 5001)],
        "borders": [[50 * epoch, epoch] for epoch in range(1, 101)],
        "metrics": [
            {"step": 50 * epoch, "epoch": epoch, "loss": 1 / epoch, "accuracy": 1 - 1 / epoch}
            for epoch in range(1, 101)
        ],
        "best": {"step": 5000, "epoch": 100, "loss": 0.01, "accuracy": 0.99},
    }
    assert len(page(made_report(full())).encode()) < 60_000
    assert len(page(made_report({**full(), **steps})).encode()) < 150_000
    assert len(page(made_report(long)).encode()) < 110_000


def test_another_room_adds_a_section_and_its_text_is_never_markup() -> None:
    def rounds(report: Any) -> str:
        return Markup("<section>\n<h2>Rounds</h2>\n<p>{}</p>\n</section>").format(report.job)

    text = page(made_report({"job": "<b>gpt"}), more=[rounds, lambda report: "<i>not markup</i>", lambda report: ""])
    assert well_nested(text) and "<h2>Rounds</h2>\n<p>&lt;b&gt;gpt</p>" in text and "&lt;i&gt;not markup" in text


def test_sections_are_found_by_entry_points_and_a_broken_one_only_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint("hello", "tests.show.page.test_document:greeting", "shoestring.sections"),
        EntryPoint("broken", "nothing_like_it", "shoestring.sections"),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    from_packages.cache_clear()
    try:
        text = content(made_report(full()))
        assert well_nested(text) and "<p>hello gpt</p>" in text
        assert "nothing_like_it can&#39;t be shown: ModuleNotFoundError" in text and "Memory through one step" in text
    finally:
        from_packages.cache_clear()


def greeting(report: Any) -> str:
    return Markup("<section><p>hello {}</p></section>").format(report.job)


def test_every_figure_that_was_predicted_and_measured_is_compared() -> None:
    report = full()
    report["predicted"]["traffic_bytes"], report["measured"]["traffic_bytes"] = 5 * MIB, 5 * MIB
    text = page(made_report(report))
    assert (
        '<th scope="row">Disk, a step</th><td>5.00 MiB</td><td>5.00 MiB</td><td>as predicted</td>' in text
        and "Sent, a step" not in text
    )


def test_nothing_is_fetched_from_anywhere() -> None:
    text = page(made_report(full())).replace("http://www.w3.org/2000/svg", "")
    for word in ("http://", "https://", "src=", "href=", "url(", "@import", "fetch("):
        assert word not in text
    assert text.count("<script>") == text.count("<script") == 1 and "default-src 'none'; style-src 'sha256-" in text


def told(state: str, **more: Any) -> dict[str, Any]:
    """The story of a run that began and did 120 of 400 steps; all of them if it is finished."""
    return {
        **full(),
        "name": "gpt-1",
        "state": state,
        "step": 400 if state == "finished" else 120,
        "steps": 400,
        "seconds": [0.5] * 120,
        "begun": 1.6e9,
        "last": 1.6e9 + 70,
        "now": 1.6e9 + 80,
        "checkpoints": [
            {"step": 50, "bytes": MIB, "seconds": 0.1, "time": 1.6e9 + 30},
            {"step": 100, "bytes": MIB, "seconds": 0.1, "time": 1.6e9 + 60},
        ],
        "events": [
            {"event": "planning", "time": 1.6e9, "memory": 600 * MIB},
            {"event": "begun", "time": 1.6e9 + 5, "pid": 1, "steps": 400, "step": 0, "how": "data from the job"},
            {"event": "saved", "time": 1.6e9 + 30, "step": 50, "bytes": MIB, "seconds": 0.1},
            {"event": "warning", "time": 1.6e9 + 40, "text": "the disk is <nearly> full"},
            {"event": "saved", "time": 1.6e9 + 60, "step": 100, "bytes": MIB, "seconds": 0.1},
        ],
        **more,
    }


def plain_text(text: str) -> str:
    return text.replace("&nbsp;", " ")


HEADLINES = {
    "planning": "Planning how to train inside 600 MiB.",
    "running": "Step 120 of 400, about 2 min left.",
    "stopped": "Stopped at step 120 of 400.",
    "failed": "Failed at step 120 of 400.",
    "died": "Died at step 120 of 400.",
    "finished": "Trained 400 steps inside 600 MiB; plain training would have needed 1.20 GiB.",
}


@pytest.mark.parametrize("more", [{"plain": {"process_bytes": 520 * MIB}}, {"techniques": []}])
def test_plain_training_is_not_said_to_have_needed_less_or_what_it_needed_where_it_was_plain(
    more: dict[str, Any],
) -> None:
    text = plain_text(page(made_report(told("finished") | more)))
    assert "Trained 400 steps inside 600 MiB." in text and "would have needed" not in text


@pytest.mark.parametrize("state", sorted(HEADLINES))
def test_the_headline_says_where_the_run_stands(state: str) -> None:
    text = plain_text(page(made_report(told(state))))
    assert well_nested(text)
    assert f'<p class="verdict">{HEADLINES[state]}</p>' in text
    assert f'<span class="pill {state}">{"Training" if state == "running" else state.capitalize()}</span>' in text


def test_a_run_that_trains_shows_progress_speed_and_time_left() -> None:
    text = plain_text(content(made_report(told("running"))))
    for words in (
        "30 %",
        "Saved up to step 100; 20 steps have come since.",
        "1.1 steps/s",
        "910 ms, the median step",
        "about 2 min",
        "65 s so far",
        "531 MiB",
        "of 600 MiB",
        'data-title="Training 30 % · gpt · shoestring"',
    ):
        assert words in text, words


def test_a_dead_run_says_why_and_when_it_was_last_heard_of() -> None:
    text = content(made_report(told("died", text="The process is gone. It can go on from step 100.")))
    assert '<p class="banner died">The process is gone. It can go on from step 100.' in text
    assert "Last sign of life: " in text


def test_events_are_told_newest_first_and_warnings_are_marked() -> None:
    text = plain_text(content(made_report(told("running")))).split("What happened")[1]
    order = [
        text.index(words)
        for words in (
            "Saved a checkpoint at step 100",
            "<b>Warning</b> The disk is &lt;nearly&gt; full",
            "Saved a checkpoint at step 50",
            "Training begins, 400 steps to do. Data from the job",
            "Planning for 600 MiB",
        )
    ]
    assert order == sorted(order)
    assert '<li class="warned">' in text


def test_checkpoints_in_a_row_are_told_as_one_event() -> None:
    saved = [{"time": 1.6e9 + step, "step": step} for step in range(1, 1001)]
    events = [{"event": "saved", **one} for one in saved]
    text = content(made_report(told("running", events=events, checkpoints=saved)))
    assert "Saved 1,000 checkpoints, the last at step 1,000" in text
    assert "1,000 checkpoints saved, 1,000 of them are on disk now" in text


@pytest.mark.parametrize(
    "event",
    [
        {"event": "new kind", "text": 5},
        {"event": "saved", "step": -5, "time": 1e30},
        {"event": "begun", "step": 0, "steps": 0, "time": 1e30},
        {"event": "adopted", "differences": []},
        {"event": "failed"},
        {"event": "validated", "step": 1, "metrics": {"loss": None}},
    ],
)
def test_events_of_any_shape_are_told(event: dict[str, Any]) -> None:
    assert well_nested(page(made_report({"state": "running", "events": [event]})))


@pytest.mark.parametrize("key", sorted(told("running")))
@pytest.mark.parametrize("nothing", ["missing", "empty"])
def test_any_one_thing_of_a_story_may_be_missing(key: str, nothing: str) -> None:
    for state in HEADLINES:
        story = told(state)
        story[key] = type(story[key])()
        if nothing == "missing":
            del story[key]
        assert well_nested(page(made_report(story)))
    assert well_nested(overview([summary(made_report(story), "name"), summary(made_report({}), "other")])) and curves(
        made_report(story)
    )


def test_the_style_is_in_classes_so_that_a_strict_page_may_show_it() -> None:
    text = content(made_report(told("died", text="gone")))
    assert "style=" not in text and "onclick" not in text


def test_text_that_cannot_be_written_is_replaced() -> None:
    page(made_report(told("failed", text="half a character: \ud800", job="\udfff"))).encode()


@pytest.mark.parametrize("text", ['"' * 100_000, "&" * 100_000, "\N{SLICE OF PIZZA}" * 100_000, "word & " * 50_000])
def test_a_page_stays_under_150_kb_whatever_it_is_told(text: str) -> None:
    steps = 100_000
    many = [f"{place}{text}" for place in range(900)]  # each once: hundreds of thousands of copies would be gigabytes
    huge = told(
        "failed",
        text=text,
        job=text,
        run=text,
        shown=text,
        basis=text,
        weights_sha256=text,
        losses=[1 / step for step in range(1, steps + 1)],
        seconds=[0.1] * steps,
        step=steps,
        steps=steps,
        samples_process=[[0.1 * step, 5 * MIB + step] for step in range(steps)],
        flags=dict.fromkeys(many[:100], text),
        techniques=[{"name": text, "knobs": {text: text}, "why": text}] * 50,
        runners_up=[{"text": text, "lost": text}] * 50,
        events=[{"event": "warning", "time": 1.6e9, "text": text} for _ in range(500)],
        checkpoints=[{"step": 5, "time": 1.6e9}] * 500,
        blocks=[[name, MIB] for name in many],
        measured={"process_bytes": MIB, "parts": dict.fromkeys(many[:50], MIB)},
        metrics=[{"step": step, **dict.fromkeys(many[:20], step / 7)} for step in range(1, 501)],
        best={"step": 7},
        rates=[1 / step for step in range(1, steps + 1)],
        norms=[1 / step for step in range(1, steps + 1)],
    )
    assert len(page(made_report(huge)).encode()) < 150_000 and len(curves(made_report(huge))) < 150_000
    assert (
        len(
            overview([summary(made_report(huge), "one"), summary(made_report({"flags": {text: text}}), "two")]).encode()
        )
        < 60_000
    )


def test_an_overview_has_a_row_for_each_run_that_leads_to_it() -> None:
    story = told("running")
    text = overview([summary(made_report(story), "a/b <c>"), summary(made_report({"state": "died"}), "second")])
    assert well_nested(text)
    for words in (
        "2 runs",
        "1 training, 1 died",
        'href="/run/a%2Fb%20%3Cc%3E"',
        "a/b &lt;c&gt;",
        "1 warning",
        'href="/run/second"',
    ):
        assert words in text, words


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


def raising(error: BaseException) -> str:
    raise error


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (lambda entries: None, "it gave a NoneType, not text"),
        (lambda entries: 3, "it gave a int, not text"),
        (lambda entries: raising(KeyError("x")), "KeyError"),
        (lambda entries: raising(SystemExit(3)), "SystemExit: 3"),
        (lambda entries: raising(Unsayable()), "Unsayable"),
        ("no function", "TypeError"),
    ],
)
def test_a_section_that_gives_no_text_or_raises_is_told_in_its_place(section: Any, told: str) -> None:
    found = page(made_report({"job": "gpt"}), [guarded_section("theirs", lambda: section)])
    assert "theirs can&#39;t be shown" in found and told in found and "</html>" in found
