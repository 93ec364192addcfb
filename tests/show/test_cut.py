"""A model that is cut, as people see it: which stage holds what, who computes when, measured under predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.files.codec import to_json
from shoestring.core.workers.staging import RankFigures, Staging, Work
from shoestring.planning.plan import Outcome
from shoestring.runs.events.event import StageTimes
from shoestring.runs.events.event_log import note
from shoestring.runs.folder import Folder
from shoestring.runs.reports.plan_summary import CutPlan
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from shoestring.show.cut import model_cut
from shoestring.show.page import page
from shoestring.show.page.sections.cut import stages
from shoestring.show.terminal import Screen, render_text
from shoestring.show.timeline import cut_text
from shoestring.training.planning.plan import TrainingDetails, training_plan
from shoestring.training.report.outcome_text import standing
from tests.show.made_runs import MIB, made_run


def works_of(timeline: list[list[list[Any]]]) -> tuple[tuple[Work, ...], ...]:
    return tuple(tuple(Work(*work) for work in own) for own in timeline)


WORKS: list[list[list[Any]]] = [
    [["F", 0, 0, 0.0, 1.0], ["F", 1, 0, 1.0, 2.0], ["B", 0, 0, 4.0, 6.0], ["B", 1, 0, 7.0, 9.0]],
    [["F", 0, 1, 1.0, 2.0], ["B", 0, 1, 2.0, 4.0], ["F", 1, 1, 4.0, 5.0], ["B", 1, 1, 5.0, 7.0]],
]
SLOW = [[[*work[:3], 2 * work[3], 2 * work[4]] for work in own] for own in WORKS]
NAMES = ("a.0", "a.1", "a.2", "b.0", "b.1", "b.2", "b.3", "b.4")
MESH = {"data": 2, "stage": 2, "tensor": 1}
CUT = Staging((3, 5), "1f1b", 2, 1 / 3, works_of(WORKS), why="8 blocks are cut 3+5; because", names=NAMES)
RANKS = (RankFigures((0, 2), 30 * MIB, 1.0), RankFigures((1, 3), 50 * MIB, 1.0))
CHOSEN = training_plan(details=TrainingDetails(mesh=MESH, staging=CUT, ranks=RANKS))


def test_a_plan_says_mesh_cut_and_draws_the_schedule() -> None:
    lines = render_text(standing(CHOSEN, Screen(90)), Screen(90)).splitlines()
    assert lines[0] == "mesh: 2 copies of the model x 2 stages (data 2, stage 2, tensor 1)"
    assert lines[1].strip() == "8 blocks are cut 3+5; because"
    assert [line.split() for line in lines[5:7]] == [
        ["0", "3", "a.0", "to", "a.2", "30.0", "MiB"],
        ["1", "5", "b.0", "to", "b.4", "50.0", "MiB"],
    ]
    assert "predicted: 9 s, 33 % idle" in lines and not any("measured" in line for line in lines)
    drawn = [line for line in lines if line.startswith("stage ") and ("F" in line)]
    assert drawn[0].startswith("stage 0  F0") and drawn[1].startswith("stage 1  ··")


def test_a_plan_without_stages_says_its_mesh_alone_and_one_worker_nothing() -> None:
    copies = training_plan(details=TrainingDetails(mesh={"data": 4, "stage": 1, "tensor": 1}))
    assert render_text(standing(copies, Screen(90)), Screen(90)).startswith("mesh: 4 copies")
    assert standing(training_plan(), Screen(90)) == []


def test_idle_time_is_coloured_where_there_is_colour() -> None:
    cut = model_cut(CutPlan(MESH, CUT, RANKS))
    assert "\x1b[31m·" in cut_text(cut, Screen(80, colour=True)) and "\x1b" not in cut_text(cut)


def test_chunks_go_round_the_stages() -> None:
    cut = model_cut(CutPlan(MESH, replace(CUT, cut=(1, 2, 3, 2), names=tuple("abcdefgh")), RANKS))
    assert [(row.blocks, row.names) for row in cut.rows] == [(4, "a, d to f"), (4, "b to c, g to h")]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = made_run(tmp_path / "run", done=9)
    Folder(path).write("plan.json", Outcome(CHOSEN).as_json())
    return path


def test_the_report_has_measured_beside_predicted_as_soon_as_it_is_told(run: Path) -> None:
    before = report_json(report_of(run))
    assert before["bubble"] == {"predicted": 1 / 3, "measured": None} and before["timeline"]["measured"] is None
    note(run, StageTimes(9, 0.4, 7, works_of(SLOW), (1, 2, 3, 4)))
    found = report_json(report_of(run))
    assert found["mesh"] == MESH and found["cut"] == [3, 5] and found["schedule"] == "1f1b"
    assert found["bubble"] == {"predicted": 1 / 3, "measured": 0.4}
    assert found["timeline"] == {"predicted": WORKS, "measured": SLOW, "step": 9, "steps": 7, "one_clock": True}
    told = report_of(run)
    assert told.plan.cut is not None
    cut = model_cut(told.plan.cut, told.timed)
    assert [(row.predicted, row.measured) for row in cut.rows] == [(30 * MIB, 3), (50 * MIB, 4)]
    assert (
        "the measured picture is of step 9; workers waited for 40 % of a step, the median of 7 steps"
        in cut_text(cut).splitlines()
    )


def test_the_page_shows_the_picture_and_what_every_stage_holds(run: Path) -> None:
    note(run, StageTimes(9, 0.4, 7, works_of(SLOW), (1, 2, 3, 4), machines=True))
    shown = page(report_of(run))
    section = shown[shown.index("Who computes when") :]
    assert "Predicted: 9 s, 33 % idle" in section and "Measured: 18 s, 33 % idle" in section
    assert (
        "Stage 1" in section
        and "5: b.0 to b.4" in section
        and "50.0 MiB" in section
        and "no clock in common" in section
    )
    assert "Who computes when" not in page(report_of(made_run(run.parent / "whole", done=1))), (
        "a model that is not cut has no such section"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"mesh": None},
        {"mesh": {"stage": 0}},
        {"staging": 3},
        {"ranks": [3]},
        *(
            {"staging": {**to_json(CUT), **one}}
            for one in (
                {"cut": None},
                {"cut": ["x"]},
                {"timeline": [[["F", 0]]]},
                {"bubble": {}},
                {"timeline": {"predicted": 3}},
                {"names": 7},
                {"pieces": None},
                {"timeline": [[["Q", 0, 0, 0.0, 1.0]]]},
            )
        ),
    ],
)
def test_a_page_is_drawn_without_what_can_not_be_read(wrong: dict[str, Any], run: Path) -> None:
    file = Outcome(CHOSEN).as_json()
    Folder(run).write(
        "plan.json", {**file, "chosen": {**file["chosen"], "details": {**file["chosen"]["details"], **wrong}}}
    )
    told = report_of(run)
    assert told.damage or stages(told) == ""
    assert page(told).startswith("<!doctype html>")
