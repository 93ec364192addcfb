"""The page of a federated run: rounds in place of steps, who took part, bytes, privacy, A/B tables, and who is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from math import exp, inf, nan
from pathlib import Path
from typing import Any

import pytest

from shoestring.federated.events import RoundFinished
from shoestring.federated.options import FederateOptions
from shoestring.federated.playing.fold import ABRow, ABTable, FederationReport
from shoestring.federated.report.page_style import STYLE_OF_FEDERATED
from shoestring.runs.folder import Folder, Lock
from shoestring.runs.reports.report import Report, report_of
from shoestring.show.page import content, page
from shoestring.show.page.overview import curves, overview, summary
from shoestring.show.page.sections.top import title
from shoestring.show.page.style import STYLE
from tests.show.made_reports import made_report
from tests.show.made_runs import MIB, add, append, made_run, moments_ago
from tests.show.page.test_document import full, well_nested

NASTY = '<b>x</b> & "it"'
ROWS: list[dict[str, Any]] = [
    {
        "metric": "accuracy",
        "group": "all",
        "one": 0.8812,
        "other": 0.9011,
        "delta_percent": 2.26,
        "low": 1.1,
        "high": 3.4,
        "devices": 1000,
        "verdict": "better",
    },
    {
        "metric": "accuracy",
        "group": NASTY,
        "one": 0.8912,
        "other": 0.8711,
        "delta_percent": -2.2,
        "low": -4.4,
        "high": -0.4,
        "devices": 212,
        "verdict": "worse",
    },
    {
        "metric": "loss",
        "group": "moon",
        "one": None,
        "other": None,
        "delta_percent": None,
        "low": None,
        "high": None,
        "devices": None,
        "verdict": "too few devices",
    },
]


def round_fields(number: int, names: list[str], of: int = 10) -> dict[str, Any]:
    """A round of ten devices: one is missing in every second, one is turned away in every fifth."""
    missing, rejected = (
        [names[number % len(names)]] * (number % 2),
        [[names[-1], "3 values are not numbers"]] * (number % 5 == 0),
    )
    took = of - len(missing) - len(rejected)
    return {
        "step": number,
        "participants": took,
        "samples": 20.0 * took,
        "up": 1000 * took,
        "senders": took,
        "down": 4000 * of,
        "ordered": of,
        "missing": len(missing),
        "missing_names": missing,
        "rejected": rejected,
    }


def federated_run(
    path: Path,
    done: int = 20,
    rounds: int = 40,
    epsilon: float | None = None,
    names: list[str] | None = None,
    end: dict[str, Any] | None = None,
    comparisons: list[dict[str, Any]] | None = None,
) -> Path:
    """The folder of a federated run after so many rounds. It spends a twentieth of epsilon 2 in a round."""
    path.mkdir(parents=True)
    folder, names = Folder(path), names or [f"writer-{place}" for place in range(30)]
    folder.write(
        "run.json",
        {
            "job": "jobs/digits.py",
            "flags": {"lr": 0.05},
            "room": "federated",
            "asked": {
                "rounds": rounds,
                "clients": 30,
                "per_round": 10,
                "upload": 2000,
                "download": None,
                "epsilon": epsilon,
                "delta": 1e-6 if epsilon else None,
            },
        },
    )
    folder.write(
        "plan.json",
        {
            "shoestring": 3,
            "chosen": {
                "techniques": [],
                "exactness": "to rounding",
                "up_bytes": 1000,
                "down_bytes": 4000,
                "round_seconds": 0.5,
                "total_seconds": 20.0,
            },
            "plain": {"up_bytes": 4000, "down_bytes": 4000, "round_seconds": 0.4, "total_seconds": 16.0},
        },
    )
    begun = moments_ago(done + 6)
    events: list[dict[str, Any]] = [
        {"event": "planning", "time": begun},
        {"event": "begun", "time": begun + 5, "pid": 1, "steps": rounds, "step": 0},
    ]
    for number in range(1, done + 1):
        told: dict[str, Any] = {"event": "round", "time": begun + 5 + number, **round_fields(number, names)}
        told |= {"epsilon": 0.1 * number} if epsilon else {}
        if number % 10 == 0:
            told |= {"before": {"accuracy": 0.8 + number / 1000}, "after": {"accuracy": 0.9 + number / 1000}}
        events += [
            {
                "event": "step",
                "time": begun + 5 + number,
                "step": number,
                "loss": 2 * exp(-number / 10),
                "seconds": 0.5,
                "process": 300 * MIB,
                "most": 300 * MIB,
            },
            told,
        ]
        if number % 10 == 0:
            events += [
                {
                    "event": "validated",
                    "time": begun + 5 + number,
                    "step": number,
                    "metrics": {"loss": 1 / number, "accuracy": 0.7},
                    "best": True,
                },
                {
                    "event": "saved",
                    "time": begun + 5 + number,
                    "step": number,
                    "checkpoint": f"step-{number}",
                    "bytes": 4000,
                },
            ]
    append(
        path,
        events + ([{"event": "finished", "time": begun + 5 + done, "step": done, **end}] if end is not None else []),
    )
    if comparisons is not None:
        folder.write("comparisons.json", {"comparisons": comparisons})
    return path


def told_of(path: Path) -> Report:
    return report_of(path)


def words_of(text: str) -> str:
    """What a person reads, charts' data left out."""
    shown = re.sub(r' data-chart="[^"]*"', "", text.rpartition("<main>")[2].partition("</main>")[0])
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", shown)).replace("\xa0", " "))


def chart(text: str, key: str) -> dict[str, Any]:
    found = [json.loads(unescape(one)) for one in re.findall(r'data-chart="([^"]*)"', text)]
    return next(one for one in found if one["key"] == key)


def test_every_section_has_the_numbers_of_the_rounds(tmp_path: Path) -> None:
    text = page(told_of(federated_run(tmp_path / "run", epsilon=4.0, end={}, done=20, rounds=20)))
    assert well_nested(text)
    took = [10 - number % 2 - (number % 5 == 0) for number in range(1, 21)]
    lines = {line["name"]: line for line in chart(text, "participants")["lines"]}
    assert lines["took part"]["y"] == took and lines["missing"]["y"] == [number % 2 for number in range(1, 21)]
    assert lines["turned away"]["y"] == [int(number % 5 == 0) for number in range(1, 21)]
    up, down = chart(text, "traffic")["lines"]
    assert up["y"] == [1000 * sum(took[:number]) for number in range(1, 21)] and down["y"][-1] == 20 * 40_000
    private = chart(text, "epsilon")
    assert private["budget"] == 4.0 and private["lines"][0]["y"] == pytest.approx(
        [0.1 * number for number in range(1, 21)]
    )
    before, after = chart(text, "devices accuracy")["lines"]
    assert (before["x"], before["y"], after["y"]) == ([10, 20], [0.81, 0.82], [0.91, 0.92])
    words = words_of(text)
    for said in (
        "Trained 20 rounds, each with 10 of 30 clients; epsilon 2.000 of 4 is spent.",
        "Participants 9 of 10 in the last round",
        f"Sent up {sum(took) / 1.024:.0f} KiB 781 KiB down",
        "Missing 10 times 4 turned away",
        "Epsilon 2.000 of 4, delta 1e-6",
        "Epsilon 2.000 of 4 is spent at delta 1e-6, 2.000 is left.",
        "A device sends 1,000 B a round, of 1.95 KiB that it may. A device is given 3.91 KiB a round.",
        "On what devices hold out: 0.8200 before, 0.9200 after their own work",
        "4 updates could not be used",
        "writer-29 3 values are not numbers 20",
        "Up, a device 1,000 B 1,000 B as predicted 3.91 KiB",
        "per round 10",
        "upload 1.95 KiB",
        "The plain round, no technique.",
    ):
        assert said in words, said


@pytest.mark.parametrize("state", ["planning", "running", "died", "finished", "failed"])
def test_a_federated_run_counts_rounds_and_never_steps(tmp_path: Path, state: str) -> None:
    done = 0 if state == "planning" else 20
    path = federated_run(tmp_path / "run", done=done, end={} if state == "finished" else None)
    if state == "failed":
        append(path, [{"event": "failed", "time": moments_ago(0), "text": "the disk is full"}])
    lock = Lock(path) if state in ("running", "planning") else None
    told = replace(told_of(path), text="")  # the report's own words
    if lock:
        lock.release()
    diverged = replace(told.curves, losses=[*told.curves.losses[:-1], nan])
    text = page(replace(told, curves=diverged) if state == "failed" else told)
    assert not re.search(r"\bsteps?\b", words_of(text).lower())
    assert {json.loads(unescape(one))["across"] for one in re.findall(r'data-chart="([^"]*)"', text)} <= {
        "round",
        "time",
    }


def test_the_headline_and_the_progress_are_in_rounds(tmp_path: Path) -> None:
    path = federated_run(tmp_path / "run", done=25)
    lock = Lock(path)
    told = told_of(path)
    lock.release()
    words = words_of(page(told))
    for said in (
        "Round 25 of 40, about",
        "Saved up to round 20; 5 rounds have come since.",
        "2 rounds/s 500 ms, the median round",
        "best, round 20",
        "Training begins, 40 rounds to do",
    ):
        assert said in words, said
    assert title(told) == "Training 62 % · digits · shoestring"
    assert (
        "All rounds 20 s \N{EN DASH} \N{EN DASH} 16 s" in words
    )  # what all rounds take is measured when they are over


@pytest.mark.parametrize(
    ("budget", "spent", "over"),
    [(4.0, "epsilon 2.000 of 4 is spent", False), (1.5, "epsilon 2.000 is spent, above the budget of 1.5", True)],
)
def test_a_run_over_its_epsilon_is_red_and_one_inside_is_not(
    tmp_path: Path, budget: float, spent: str, over: bool
) -> None:
    text = content(told_of(federated_run(tmp_path / "run", epsilon=budget, end={"ended": "epsilon is spent"})))
    assert f"Trained 20 of 40 rounds: {spent}." in words_of(text) and "Ended early" in text
    assert ('<span class="over">2.000</span>' in text) == over
    bar = re.search(rf'aria-label="{spent}">.*?<rect class="tone-(\w+)" x="0.0" width="([\d.]+)"', text, re.DOTALL)
    assert bar is not None and bar.groups() == (("alert", "1000.0") if over else ("optimizer", "500.0"))


def test_an_epsilon_without_a_budget_has_no_limit(tmp_path: Path) -> None:
    told = told_of(federated_run(tmp_path / "run", epsilon=4.0))
    asked = replace(told.of_room.asked, epsilon=None, delta=None)
    text = content(replace(told, of_room=replace(told.of_room, asked=asked)))
    assert chart(text, "epsilon")["budget"] is None and "Epsilon 2.000 is spent." in words_of(text)


def test_names_are_text_and_never_markup_and_many_are_told_by_their_number(tmp_path: Path) -> None:
    names = [f"{NASTY} {place} {'y' * (300 * (place % 2))}" for place in range(40)]
    path = federated_run(tmp_path / "run", done=40, names=names, comparisons=[{"title": NASTY, "rows": ROWS}])
    add(path, "round", step=41, participants=3, before={NASTY: 0.5}, rejected=[[NASTY, NASTY]])
    text = page(told_of(path))
    said = text.split("<main>")[1].split("</main>")[0]
    assert well_nested(text) and "<b>x" not in said and "y" * 100 not in said
    assert said.count("&lt;b&gt;x&lt;/b&gt;") > 12 and "and 8 more" in said


def test_a_comparison_is_a_table_with_a_picture_of_every_interval(tmp_path: Path) -> None:
    text = page(told_of(federated_run(tmp_path / "run", end={}, comparisons=[{"title": "A against B", "rows": ROWS}])))
    section = text.split("A against B</h2>")[1].split("</section>")[0]
    words = words_of(section)
    for said in (
        "accuracy all 0.8812 0.9011 +2.26 % +1.10 to +3.40",
        "1,000 better",
        "-2.20 % -4.40 to -0.40",
        "212 worse",
        "moon \N{EN DASH} \N{EN DASH} \N{EN DASH}",
        "too few devices",
        "reach to 4.4 % on either side",
    ):
        assert said in words, said
    # zero is in the middle of 200, and the widest end, -4.4 %, at the edge of the scale, 6 from that of the picture
    bars = re.findall(r'<rect class="tone-(\w+) pale" x="([\d.]+)" y="6" width="([\d.]+)"', section)
    assert bars == [("update", "123.5", "49.1"), ("alert", "6.0", "85.5")] and section.count('class="zero"') == 2


def test_a_wide_interval_of_a_small_group_leaves_the_others_their_width(tmp_path: Path) -> None:
    rows = [{"metric": "loss", "delta_percent": 1.0, "low": -1.0, "high": 3.0} for _ in range(5)]
    wide = {"metric": "loss", "delta_percent": 80.0, "low": -400.0, "high": 560.0}
    text = content(told_of(federated_run(tmp_path / "run", comparisons=[{"rows": [*rows, wide]}])))
    bars = [(float(x), float(width)) for x, width in re.findall(r'pale" x="([\d.]+)" y="6" width="([\d.]+)"', text)]
    assert bars[:5] == [(89.6, 41.8)] * 5 and bars[5] == (
        0.0,
        200.0,
    )  # cut at the picture's edges, without its estimate
    assert text.count('class="at ') == 5


DAMAGES: list[Any] = [
    None,
    {},
    [],
    "text",
    7,
    nan,
    [None],
    ["x", 3],
    [{}],
    [{"round": None, "name": 5}],
    [nan, inf, -1],
    [[1, 2]],
]


@pytest.mark.parametrize("damage", DAMAGES, ids=repr)
def test_a_damaged_key_never_takes_the_page_down(tmp_path: Path, damage: Any) -> None:
    path = federated_run(tmp_path / "run", epsilon=4.0, comparisons=[{"title": "A against B", "rows": ROWS}])
    folder = Folder(path)
    files = {"comparisons.json": folder.read("comparisons.json"), "run.json": folder.read("run.json")}
    asked = files["run.json"]["asked"]
    odd = [
        ("comparisons.json", {"comparisons": damage}),
        ("comparisons.json", {"comparisons": [{"title": damage, "rows": damage}]}),
        ("comparisons.json", {"comparisons": [{"rows": [dict.fromkeys(ROWS[0], damage)]}]}),
        ("run.json", {**files["run.json"], "asked": damage}),
        *(("run.json", {**files["run.json"], "asked": {**asked, name: damage}}) for name in asked),
    ]
    whole = summary(report_of(path), "two")
    for name, told in odd:
        folder.write(name, told)
        report = report_of(path)
        assert well_nested(page(report)) and curves(report)
        assert well_nested(overview([summary(report, "one"), whole]))
        assert report.of_room is not None or report.damage, "what can't be shown is told"
        folder.write(name, files[name])


def test_rounds_whose_events_are_lost_are_left_out(tmp_path: Path) -> None:
    path = federated_run(tmp_path / "run", done=3)
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    lost = next(place for place, line in enumerate(lines) if b'"round"' in line and b'"step":2' in line)
    (path / "events.jsonl").write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    assert chart(content(told_of(path)), "participants")["lines"][0]["x"] == [1, 3]


def test_a_page_stays_small_however_many_rounds_and_rows() -> None:
    many, text = 20_000, "<&>" * 5_000
    metrics = {f"{place}{text}": 0.5 for place in range(20)}
    rounds = [
        RoundFinished(
            step=number,
            participants=7,
            up=7,
            down=7,
            missing=7,
            epsilon=7.0,
            simulated=7.0,
            before=metrics if number < 500 else None,
            missing_names=(f"{number}{text}",) if number < 500 else (),
            rejected=((text, text),) if number < 500 else (),
        )
        for number in range(1, many + 1)
    ]
    row = ABRow(text, text, 1.0, 2.0, 0.5, -1.0, 2.0, None, text)
    own = FederationReport(
        FederateOptions(ledger=text, statistics=text), tuple(rounds), (ABTable(text, (row,) * 50),) * 20
    )
    told = {"room": "federated", "state": "running", "step": many, "steps": many, "losses": [1.0] * many}
    found = page(made_report(told, own))
    assert len(found.encode()) < 200_000
    assert found.count('<td data-name="First">') == 60


def test_a_training_has_no_trace_of_a_federation(tmp_path: Path) -> None:
    for story in (made_report(full()), told_of(made_run(tmp_path / "run", done=60, per_epoch=20))):
        text = page(story)
        assert (
            not re.search(r"\brounds?\b", words_of(text).replace("rounds of the data", ""))
            and STYLE_OF_FEDERATED not in text
            and STYLE in text
        )
        assert "participants" not in curves(story)


def test_an_overview_tells_rounds_and_steps_apart(tmp_path: Path) -> None:
    private, plain = (
        summary(told_of(federated_run(tmp_path / name, epsilon=epsilon, end={}, rounds=20)), name)
        for name, epsilon in (("private", 1.5), ("plain", None))
    )
    both = overview([private, plain])
    assert chart(both, "runs")["across"] == "round" and "20 rounds" in both
    heads = re.findall(r'<th scope="col" data-name="([^"]*)"', both)
    assert heads[-5:] == ["Participants", "Bytes up", "Epsilon spent", "Memory", "Time"] and {
        "epsilon",
        "Techniques",
    } <= set(heads)
    assert re.findall(r'class="over">([^<]*)<', both) == ["2.000"]
    mixed = overview([private, summary(told_of(made_run(tmp_path / "gpt", done=30)), "gpt")])
    heads = re.findall(r'<th scope="col" data-name="([^"]*)"', mixed)
    assert chart(mixed, "runs")["across"] == "step or round" and {"Bytes up", "Predicted", "Measured", "Budget"} <= set(
        heads
    )


def test_the_lines_of_a_federated_run_can_be_overlaid(tmp_path: Path) -> None:
    told = json.loads(curves(told_of(federated_run(tmp_path / "run", epsilon=4.0))))
    assert list(told) == ["training loss", "held-out loss", "accuracy", "participants", "epsilon", "bytes up", "memory"]
    assert told["epsilon"]["y"][-1] == 2.0 and told["bytes up"]["y"][:2] == [9000, 19000]
