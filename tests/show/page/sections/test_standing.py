"""How a run is told of: what went wrong is red and says why, times are those of training, and what is gone is not listed."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.figures import Figure
from shoestring.planning.quantities import MEASURABLE
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from shoestring.show.page import content, page
from shoestring.show.page.live import live
from shoestring.show.page.overview import curves, overview, summary
from shoestring.show.page.sections.figures import comparison
from shoestring.show.page.sections.standing import divergence_text, standing
from tests.show.made_reports import made_report
from tests.show.made_runs import add, append, made_run, step_fields
from tests.show.page.test_document import full, plain_text, told

FALLING = [3 / (1 + 0.1 * step) for step in range(100)]


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        (FALLING, ""),
        ([2.0 + 0.3 * (step % 5) for step in range(100)], ""),  # noise
        ([2.0 + 0.01 * step for step in range(100)], ""),  # it rises, but not far
        ([0.01, 0.05, 0.02, 0.04] * 25, ""),  # near zero, noise is many times the loss
        ([-1.0 - 0.01 * step for step in range(100)], ""),
        ([2.0] * 5, ""),
        ([*FALLING, *(8.0 + 0.1 * (step % 3) for step in range(40))], "far above"),
        ([-1.0] * 50 + [0.5] * 50, "far above"),
        ([*FALLING, nan], "not been finite since step 101"),
        ([*FALLING[:50], nan, *FALLING[50:], inf, nan], "not been finite since step 102"),
        ([nan, *FALLING], ""),  # it recovered
        ([nan], "not been finite since step 1"),
    ],
)
def test_a_loss_that_went_astray_is_told_apart_from_noise(losses: list[float], why: str) -> None:
    assert (
        (why in divergence_text(made_report({"losses": losses})))
        if why
        else divergence_text(made_report({"losses": losses})) == ""
    )


@pytest.mark.parametrize("state", ["finished", "running", "stopped"])
def test_a_diverged_run_is_red_whatever_it_does(state: str) -> None:
    text = plain_text(content(made_report(told(state, losses=[2.0] * 60 + [9.0] * 60))))
    assert '<span class="pill diverged">Diverged</span>' in text and '<p class="banner diverged">The loss' in text
    assert "inside 600 MiB" not in text.split("</header>")[0].split("verdict")[1] or state != "finished"


@pytest.mark.parametrize(
    ("ended", "tone", "word", "headline"),
    [
        ("steps", "finished", "Finished", "Trained 400 steps inside 600 MiB"),
        ("epochs", "finished", "Finished", "Trained 400 steps inside 600 MiB"),
        ("data ended", "data-ended", "Data ended", "Trained 400 of 900 steps: the data ended."),
        (
            "no better for 3 validations",
            "early",
            "Ended early",
            "Trained 400 of 900 steps: no better for 3 validations.",
        ),
    ],
)
def test_the_reason_of_the_end_has_its_own_word_and_colour(ended: str, tone: str, word: str, headline: str) -> None:
    wanted = 400 if tone == "finished" else 900
    text = plain_text(
        content(
            made_report(
                told(
                    "finished",
                    ended=ended,
                    steps=wanted,
                    events=[{"event": "begun", "time": 1.6e9 + 5, "steps": wanted, "step": 0}],
                )
            )
        )
    )
    assert f'<span class="pill {tone}">{word}</span>' in text and headline in text
    if ended == "data ended":  # also where it is the state itself
        assert plain_text(content(made_report(told("data ended", step=400, events=[])))).count("Data ended") == 2


def test_rows_of_failed_runs_say_why() -> None:
    failed = told("failed", text="the loss of step 13 is not finite: lower the learning rate. More of it.")
    assert "The loss of step 13 is not finite: lower the learning rate.</span>" in overview(
        [summary(made_report(failed), "one"), summary(made_report({}), "two")]
    )


def test_no_sentence_begins_in_lower_case() -> None:
    events = [
        {
            "event": kind,
            "time": 1.6e9 + 50,
            "text": "it went wrong. Truly",
            "how": "where it was",
            "step": 3,
            "steps": 9,
        }
        for kind in ("failed", "stopped", "died", "re-formed", "begun", "warning", "new kind")
    ]
    text = content(made_report(told("stopped", text="asked to stop", events=events)))
    words = [re.sub("<.*?>", "", one) for one in re.findall(r"<p.*?</p>", text, re.DOTALL)]
    assert "Asked to stop" in text and "It went wrong" in text and "Where it was" in text
    assert not [one for one in words if re.search(r"\. [a-z]", one)], words


@pytest.mark.parametrize("job", ["gpt", "gpt.py", "jobs/gpt.py", "/home/me/gpt.py"])
def test_the_job_has_one_name(job: str) -> None:
    assert "<b>gpt</b>" in content(made_report(told("finished", job=job)))


def test_the_difference_is_in_the_figures_own_words() -> None:
    text = content(made_report(full()))
    for one in MEASURABLE[:3]:
        figure = Figure(one, full()["predicted"][one.name], full()["measured"][one.name])
        assert f"<td>{figure.off_text}</td>" in text


def test_planning_and_pauses_are_not_part_of_the_time(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=100)  # five seconds of planning, then 0.9 s a step
    report = report_of(path)
    first = chart_of(content(report), "memory")
    assert first["lines"][0]["x"][0] == pytest.approx(0.9) and first["lines"][0]["x"][-1] == pytest.approx(90)
    assert "Planning took 5 s before that." in plain_text(content(report)) and "and 5 s of planning" in plain_text(
        content(report)
    )
    assert report.last is not None
    later = report.last + 86_400  # it is resumed the next day
    append(
        path,
        [
            {"event": "begun", "time": later, "pid": 1, "steps": 400, "step": 100, "how": ""},
            {"event": "step", "time": later + 0.9, **step_fields(101)},
        ],
    )
    assert chart_of(content(report_of(path)), "memory")["lines"][0]["x"][-1] == pytest.approx(90.9)


def chart_of(text: str, key: str) -> dict[str, Any]:
    """What the script is told of a chart, read as strictly as a browser does."""
    found = [parsed(one) for one in re.findall(r'data-chart="(.*?)"', text)]
    return next(one for one in found if one["key"] == key)


def parsed(text: str) -> Any:
    return json.loads(unescape(text), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_checkpoints_that_are_gone_are_not_listed(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=200)
    text = plain_text(content(report_of(path))).split("<h2>Checkpoints</h2>")[1].split("</section>")[0]
    assert (
        "4 checkpoints saved, 2 of them are on disk now; training stood still for 840 ms in all, 0.5 % of its time."
        in text
    )
    assert re.findall(r'<th scope="row">(\d+)', text) == ["200", "150"]
    shutil.rmtree(path / "checkpoints")
    assert "none is on disk now" in content(report_of(path))


def test_what_steps_tell_beside_their_loss_is_in_the_report(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", done=4, per_epoch=2)
    told = report_json(report_of(path))
    assert told["borders"] == [(2, 1), (4, 2)] and "step_numbers" not in told
    assert told["rates"] == [step_fields(step, 2)["rate"] for step in range(1, 5)] and len(told["norms"]) == 4
    add(path, "step", **step_fields(7))
    told = report_json(report_of(path))
    assert told["step_numbers"] == [1, 2, 3, 4, 7] and told["rates"][-1] is None
    assert not {"rates", "norms", "borders", "step_numbers"} & {
        *report_json(report_of(made_run(tmp_path / "plain", done=4)))
    }


def test_a_value_that_is_not_a_number_never_breaks_the_json() -> None:
    odd = {
        "metrics": [
            {"step": 1, "loss": nan, "accuracy": inf},
            {"step": 2, "loss": -inf, "accuracy": None},
            {"step": 3, "loss": 1.0},
        ],
        "best": {"step": 1, "loss": nan},
        "losses": [nan, 1.0, inf],
        "rates": [nan, nan, 1e-300],
        "norms": [inf, nan, 3],
        "borders": [(2, 1)],
        "seconds": [0.1, nan, 0.2],
        "samples_process": [(1, 5), (2, 7), (3, 8)],
    }
    report = made_report({"state": "running", **odd})
    text = page(report)
    for key in ("loss", "norm", "rate", "memory"):
        assert chart_of(text, key)["lines"]
    assert parsed(curves(report))["training loss"]["y"] == [None, 1.0, None]


def test_metrics_that_are_shares_are_in_one_chart_and_others_have_their_own() -> None:
    metrics = [{"step": step, "loss": 1.0, "accuracy": 0.5, "f1": 0.6, "perplexity": 30.0 + step} for step in (1, 2)]
    text = content(made_report({"losses": [1.0, 2.0], "metrics": metrics}))
    assert (
        len(chart_of(text, "metric accuracy f1")["lines"]) == 2
        and len(chart_of(text, "metric perplexity")["lines"]) == 1
    )
    assert [line["name"] for line in chart_of(text, "loss")["lines"]] == ["training", "held out"]


def test_a_hundred_runs_of_ten_thousand_steps_make_a_small_page() -> None:
    steps = 10_000
    metrics = [{"step": step, "loss": 1 / step, "accuracy": 0.5} for step in range(100, steps + 1, 100)]
    run = {
        **told("finished"),
        "losses": [1 + 1 / step for step in range(1, steps + 1)],
        "step": steps,
        "metrics": metrics,
        "best": metrics[-1],
    }
    one = summary(made_report(run), "run")
    rows = [
        summary(
            made_report({**run, "losses": [], "flags": {"lr": place, "width": 3, "name": "x" * 30}}),
            f"a-run-with-a-longer-name-{place}",
        )
        for place in range(92)
    ]
    assert len(live("100 runs", overview([one] * 8 + rows), "/events").encode()) < 150_000
    assert len(curves(made_report(run))) < 40_000


def test_the_style_of_every_state_is_there() -> None:
    from shoestring.show.page.style import STYLE

    for state in ("finished", "running", "failed", "died"):
        assert f".{standing(made_report({'state': state})).tone}.pill" in STYLE
    assert ".diverged.pill" in STYLE and ".data-ended.pill" in STYLE and ".early.pill" in STYLE


def test_steps_that_other_processes_held_up_are_marked_in_the_comparison() -> None:
    report = {
        "state": "finished",
        "predicted": {"step_seconds": 0.1},
        "measured": {"step_seconds": 1.1, "held_up": 0.9},
    }
    assert "90% of the time they waited for a core" in plain_text(comparison(made_report(report)))
    report["measured"] = {"step_seconds": 1.1, "held_up": 0.05}
    assert "waited for a core" not in plain_text(comparison(made_report(report)))
