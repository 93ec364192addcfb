"""A plan's numbers are figures, listed once; its file holds them once, and files of before still load."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.hardware import Hardware
from shoestring.core.link import Link
from shoestring.core.mesh import on_one_axis
from shoestring.measure.timeline import peak
from shoestring.planning.quantities import MEASURABLE, QUANTITIES, plan_summary
from shoestring.training.axes import kinds_of_workers
from shoestring.training.data_parallel.asynchronous import Asynchronous
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.fused import FusedOptimizer
from shoestring.training.memory.precision import Precision
from shoestring.training.outcome import Outcome
from shoestring.training.plan import Plan, RankFigures, plan_in
from shoestring.training.planner import Planner
from tests.models import job

GOLDEN = Path(__file__).parents[1] / "golden"
PAPER = Hardware(described=True, memory=1 << 40)
PLAN = Plan(
    (Accumulate(2), FusedOptimizer()),
    10,
    20,
    0.5,
    traffic_bytes=3.0,
    sent_bytes=4.0,
    where="backward of 1",
    parts=(("inputs", 4),),
    sure="a trial",
    drift=0.25,
    world=3,
    ranks=(RankFigures((0, 1), 10, 4.0), RankFigures((2,), 9, 4.0)),
    blocks=(("forward 1", 7),),
)


def test_every_quantity_is_a_figure_of_a_plan_and_a_number_to_limit() -> None:
    found = PLAN.figures
    assert [one.quantity for one in found] == list(QUANTITIES) and found["traffic_bytes"].predicted == 3.0
    assert found["drift"].predicted == 0.25 and found["process_bytes"].basis == "a trial"
    assert PLAN.numbers()["process_bytes"] == 20 and PLAN.numbers()["world"] == 3


@pytest.mark.parametrize("plan", [PLAN, Plan(), replace(PLAN, drift=math.inf)])
def test_a_file_holds_a_plan_once_and_gives_it_back(plan: Plan, tmp_path: Path) -> None:
    written = Outcome(
        plan, Plan(), ((Plan((FusedOptimizer(),), 1, 2, 3.0), "slower"),), 1, 1, 0.0, 99, (), ()
    ).as_file()
    assert json.dumps(written).count('"peak_bytes"') == 3 + len(plan.ranks), (
        "the chosen, the plain and the one that lost"
    )
    again = plan_in(json.loads(json.dumps(written)), tmp_path)
    assert again == plan and again.blocks == plan.blocks and again.ranks == plan.ranks


def test_a_page_is_told_what_a_plan_file_holds() -> None:
    written = Outcome(
        PLAN, Plan(), ((Plan((FusedOptimizer(),), 1, 2, 3.0), "slower"),), 1, 1, 0.0, 99, (), ()
    ).as_file()
    told = plan_summary(written)
    assert told["predicted"] == {
        one.name: PLAN.numbers()[one.name] for one in MEASURABLE if one.name != "validation_seconds"
    }
    assert told["techniques"][0] == {"name": "Accumulate", "knobs": {"pieces": 2}, "why": Accumulate.why}
    assert (told["exactness"], told["sure"], told["blocks"]) == ("same bits", "a trial", [["forward 1", 7]])
    assert told["runners_up"][0]["text"] == "FusedOptimizer()" and told["runners_up"][0]["lost"] == "slower"
    assert plan_summary({}) == {} == plan_summary({"chosen": 3})


@pytest.mark.parametrize(
    "file", sorted(GOLDEN.glob("version-*/**/*plan.json")), ids=lambda file: "-".join(file.parts[-3:])
)
def test_plans_of_earlier_versions_load(file: Path) -> None:
    found: Any = json.loads(file.read_text())
    plan = plan_in(found, file)
    assert plan.process_bytes == found["chosen"]["process_bytes"] and plan.sure == found["chosen"]["sure"]


def test_a_plan_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="is of version 3, and this shoestring reads up to 2"):
        plan_in(PLAN.as_file() | {"shoestring": 3}, tmp_path)


def test_what_techniques_state_is_added_up() -> None:
    planner = Planner(
        job("chain"), replace(PAPER, dtypes={"bf16": "", "fp16": ""}), inexact=True, wanted=(Precision("bf16"),)
    )
    assert planner.outcome(None, (Precision("bf16"), FusedOptimizer())).chosen.drift == pytest.approx(0.05)
    assert planner.outcome(None, (FusedOptimizer(),)).chosen.drift == 0.0


def test_every_kind_of_worker_of_a_chosen_plan_has_figures() -> None:
    made = job("chain")
    count = made.count(next(iter(made.data())))
    world = next(world for world in range(2, count) if count % world)
    chosen = Planner(made, PAPER, devices=world).outcome(None, (DataParallel(),)).chosen
    assert len(chosen.ranks) == 2 and sorted(rank for one in chosen.ranks for rank in one.ranks) == list(range(world))
    for one in chosen.ranks:
        for rank in one.ranks:
            log = rehearse(replace(made, mesh=on_one_axis(Link(rank, world))), (DataParallel(),))
            assert peak(log).bytes == one.peak_bytes and log.sent[-1] <= one.sent_bytes
    assert max(one.peak_bytes for one in chosen.ranks) == chosen.peak_bytes


def test_a_server_is_another_kind_than_those_it_serves() -> None:
    assert kinds_of_workers(job("chain"), {"data": 3}, serves=True) == [(0,), (1, 2)]
    chosen = Planner(job("chain"), PAPER, inexact=True, devices=3).outcome(None, (Asynchronous("server"),)).chosen
    server, others = chosen.ranks
    assert server.sent_bytes == chosen.sent_bytes and others.sent_bytes == chosen.sent_by_others_bytes
    assert others.peak_bytes == chosen.peak_bytes


def test_a_plan_file_without_its_chosen_plan_still_tells_the_rest() -> None:
    """A page of such a run was drawn without its plan."""
    told = {
        "techniques": [{"name": "FusedOptimizer", "knobs": {}}],
        "predicted": {"peak_bytes": 1},
        "plain": {"process_bytes": 2},
    }
    assert plan_summary(told) == told and plan_summary({}) == {}
