"""A plan's numbers are figures, listed once; its file holds them once, and files of before still load."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.core.exactness import Exactness
from shoestring.core.files.codec import Unreadable
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.core.workers.staging import RankFigures
from shoestring.measure.timeline import peak
from shoestring.planning.plan import Outcome
from shoestring.planning.quantities import MEASURABLE
from shoestring.runs.reports.plan_summary import PlanSummary, read_summary
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.precision import Precision
from shoestring.training.planning.axes import kinds_of_workers
from shoestring.training.planning.plan import TrainingDetails, TrainingPlan, plan_in, training_plan
from shoestring.training.planning.planner import Planner
from tests.models import job

GOLDEN = Path(__file__).parents[2] / "golden"
PAPER = Hardware(described=True, memory=1 << 40)
PLAN = training_plan(
    (Accumulate(2), FusedOptimizer()),
    details=TrainingDetails(
        world=3,
        where="backward of 1",
        parts={"inputs": 4},
        ranks=(RankFigures((0, 1), 10, 4.0), RankFigures((2,), 9, 4.0)),
        blocks=(("forward 1", 7),),
    ),
    basis="a trial",
    peak_bytes=10,
    process_bytes=20,
    step_seconds=0.5,
    traffic_bytes=3.0,
    sent_bytes=4.0,
    drift=0.25,
)
OTHER = training_plan((FusedOptimizer(),), peak_bytes=1, process_bytes=2, step_seconds=3.0)


@pytest.mark.parametrize("plan", [PLAN, training_plan(), PLAN.predicting(drift=math.inf)])
def test_a_file_holds_a_plan_once_and_gives_it_back(plan: TrainingPlan) -> None:
    written = json.dumps(Outcome(plan, training_plan(), runners_up=((OTHER, "slower"),)).as_json(), allow_nan=False)
    assert written.count('"process_bytes"') == 3, "the chosen, the plain and the one that lost"
    again = plan_in(json.loads(written))
    assert again == plan and again.details.blocks == plan.details.blocks and again.details.ranks == plan.details.ranks


def test_a_page_is_told_what_a_plan_file_holds() -> None:
    written = json.loads(json.dumps(Outcome(PLAN, training_plan(), runners_up=((OTHER, "slower"),)).as_json()))
    told = read_summary(written)
    assert told.predicted == {one.name: PLAN.predicted[one.name] for one in MEASURABLE}
    assert told.techniques is not None and told.techniques[0].why == Accumulate.why
    assert (told.exactness, told.basis, told.blocks) == (Exactness.BITS, "a trial", (("forward 1", 7.0),))
    assert told.runners_up[0].text == "FusedOptimizer()" and told.runners_up[0].lost == "slower"
    assert read_summary({}) == PlanSummary() == read_summary({"chosen": 3})


@pytest.mark.parametrize("version", [2, 4, None, "3", True])
def test_a_plan_of_another_version_is_refused(version: object) -> None:
    with pytest.raises(Unreadable, match=f"is of version {version}, and this shoestring reads 3: plan again"):
        plan_in(Outcome(PLAN).as_json() | {"shoestring": version})


def test_what_techniques_state_is_added_up() -> None:
    planner = Planner(
        job("chain"), replace(PAPER, dtypes={"bf16": "", "fp16": ""}), inexact=True, wanted=(Precision("bf16"),)
    )
    assert planner.outcome(None, (Precision("bf16"), FusedOptimizer())).chosen.predicted["drift"] == pytest.approx(0.05)
    assert planner.outcome(None, (FusedOptimizer(),)).chosen.predicted["drift"] == 0.0


def test_every_kind_of_worker_of_a_chosen_plan_has_figures() -> None:
    made = job("chain")
    count = made.count(next(iter(made.data())))
    world = next(world for world in range(2, count) if count % world)
    chosen = Planner(made, PAPER, devices=world).outcome(None, (DataParallel(),)).chosen
    assert len(chosen.details.ranks) == 2 and sorted(
        rank for one in chosen.details.ranks for rank in one.ranks
    ) == list(range(world))
    for one in chosen.details.ranks:
        for rank in one.ranks:
            log = rehearse(replace(made, mesh=on_one_axis(Link(rank, world))), (DataParallel(),))
            assert peak(log).bytes == one.peak_bytes and log.sent[-1] <= one.sent_bytes
    assert max(one.peak_bytes for one in chosen.details.ranks) == chosen.predicted["peak_bytes"]


def test_a_server_is_another_kind_than_those_it_serves() -> None:
    assert kinds_of_workers(job("chain"), {"data": 3}, serves=True) == [(0,), (1, 2)]
    chosen = Planner(job("chain"), PAPER, inexact=True, devices=3).outcome(None, (Asynchronous("server"),)).chosen
    server, others = chosen.details.ranks
    assert (
        server.sent_bytes == chosen.predicted["sent_bytes"]
        and others.sent_bytes == chosen.predicted["sent_by_others_bytes"]
    )
    assert others.peak_bytes == chosen.predicted["peak_bytes"]
