"""What workers send is what was planned: to the byte, for every way to unite them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.core.technique import text
from shoestring.core.workers.sum_costs import Rate, Speeds, choose_algorithm
from shoestring.jobfile import load_job
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import KINDS, CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.training.members import Group

JOB = Path(__file__).with_name("straggling.py")
STEPS = 7  # no multiple of the steps between meetings
FLAGS = {"batch": 50}  # which no number of workers here divides
PAPER = Hardware(described=True, memory=1 << 40)
TOGETHER: list[Technique] = [
    DataParallel(),
    DataParallel(linear=True, warmup=2),
    *map(Shard, (1, 2, 3)),
    *map(CompressGradients, KINDS),
    LocalSteps(h=3),
    LocalSteps(h=3, after=2),
    LocalSteps(h=2, outer=0.7),
    Asynchronous("hogwild"),
]
SERVED: list[Technique] = [Asynchronous("server"), DropStragglers()]
QUICK = (LocalSteps(h=3, after=2), CompressGradients("powersgd"))


def planned(technique: Technique, world: int) -> TrainingPlan:
    job = replace(load_job(JOB, FLAGS), steps=STEPS)
    return Planner(job, PAPER, inexact=True, wanted=(technique,), devices=world).outcome(None, (technique,)).chosen


def marked(techniques: list[Technique], worlds: tuple[int, ...]) -> list[object]:
    return [
        pytest.param(
            one,
            world,
            id=f"{text(one)}, {world} workers",
            marks=[] if one in QUICK and world == 3 else [pytest.mark.slow],
        )
        for one in techniques
        for world in worlds
    ]


def test_every_way_to_share_a_batch_is_here() -> None:
    """Of the other axes: test_tensor_processes."""
    assert {type(one) for one in (*TOGETHER, *SERVED)} == {
        kind for kind in CATALOGUE if issubclass(kind, GroupTechnique) and kind.unites == "data"
    }  # type: ignore[arg-type]


@pytest.mark.parametrize(("technique", "world"), marked(TOGETHER, (2, 3)))
def test_each_worker_sends_the_bytes_a_step_that_were_planned(technique: Technique, world: int, tmp_path: Path) -> None:
    plan, first = planned(technique, world), Group(tmp_path, world, JOB, [technique], STEPS, flags=FLAGS).results()[0]
    assert plan.predicted["sent_by_others_bytes"] == 0.0
    assert first["measured"]["sent_bytes"] == pytest.approx(plan.predicted["sent_bytes"], rel=1e-12)
    assert all(
        one["sent"] / one["steps"] == pytest.approx(plan.predicted["sent_bytes"], rel=1e-12)
        for one in first["workers"]
        if one["steps"]
    )
    kinds = {rank: kind for kind in plan.details.ranks for rank in kind.ranks}
    assert set(kinds) == set(range(world)) and all(
        kind.sent_bytes == pytest.approx(plan.predicted["sent_bytes"], rel=1e-12) for kind in plan.details.ranks
    )


@pytest.mark.parametrize(
    "technique",
    [
        pytest.param(one, marks=[] if one == DataParallel() else [pytest.mark.slow], id=text(one))
        for one in TOGETHER
        if one != Asynchronous("hogwild")
    ],
)
def test_each_worker_sends_and_needs_what_was_planned_whatever_way_sums_are_done(
    technique: Technique, tmp_path: Path
) -> None:
    """Little in a tree, more in a ring, nothing through memory: each worker sends an amount of its own, and takes room to receive into."""
    speeds = Speeds(inside=Rate(1e-8, 1e-6), measured={"tree": (Rate(1e-8, 1e-7),)})
    assert (choose_algorithm(64, (3,), speeds), choose_algorithm(1024, (3,), speeds)) == ("tree", "ring")
    job = replace(load_job(JOB, FLAGS), steps=STEPS)
    plan = (
        Planner(job, replace(PAPER, speeds=speeds), inexact=True, wanted=(technique,), devices=3)
        .outcome(None, (technique,))
        .chosen
    )
    first = Group(tmp_path, 3, JOB, [technique], STEPS, flags=FLAGS, speeds=plan.details.speeds).results()[0]
    assert [one.ranks for one in plan.details.ranks] == [(0,), (1,), (2,)] and len(
        {one.sent_bytes for one in plan.details.ranks}
    ) > 1
    for predicted, measured in zip(plan.details.ranks, first["workers"], strict=True):
        assert measured["sent"] / measured["steps"] == pytest.approx(predicted.sent_bytes, rel=1e-12)
        assert measured["peak_bytes"] == predicted.peak_bytes
    assert first["measured"]["sent_bytes"] == pytest.approx(plan.predicted["sent_bytes"], rel=1e-12)


@pytest.mark.parametrize(
    ("technique", "world"), [*marked(SERVED, (3,)), *marked(SERVED[:1], (2,)), *marked(SERVED, (4,))]
)
def test_those_who_do_not_wait_send_the_bytes_of_their_own_steps_and_the_server_what_they_ask_for(
    technique: Technique, world: int, tmp_path: Path
) -> None:
    plan, first = planned(technique, world), Group(tmp_path, world, JOB, [technique], STEPS, flags=FLAGS).results()[0]
    server, *others = first["workers"]
    assert all(one["sent"] == plan.predicted["sent_by_others_bytes"] * one["steps"] for one in others)
    assert first["measured"]["sent_by_others_bytes"] == plan.predicted["sent_by_others_bytes"]
    tallies = first["state"]["pushes"]
    pushed = sum(tallies["applied"].values()) + sum(tallies["dropped"].values())
    pull = plan.predicted["sent_bytes"] / (world - 1)  # planned as if all were as fast: every worker pulls once a step
    pulls, rest = divmod(server["sent"], pull)
    assert pushed <= pulls <= pushed + world - 1 and rest in range(0, 16 * world, 16), (
        "a pull for every push, or on its way"
    )
    if isinstance(technique, Asynchronous):
        assert (
            0 <= first["measured"]["sent_bytes"] - plan.predicted["sent_bytes"] <= plan.predicted["sent_bytes"] / STEPS
        ), "what is on its way at the end"
    else:
        assert first["measured"]["sent_bytes"] <= plan.predicted["sent_bytes"] * (1 + 1 / STEPS), "at most"
