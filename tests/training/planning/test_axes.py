"""Plans along all axes: pipelines are picked with cut, pieces and schedule, each stage is rehearsed, and the plan says where and why.

The hardware is described, so no process is started: what is measured here is arithmetic and rehearsals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Block, Ledger
from shoestring.core.costs.ledger_parts import StandingBytes, Workers
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.workers.actions import Action, Kind
from shoestring.core.workers.mesh import imagined_mesh
from shoestring.jobs import gpt
from shoestring.measure.timeline import peak
from shoestring.planning.choose import requested_candidate
from shoestring.planning.plan import Outcome, Plan
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.group_technique import mesh_sizes, uniting
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.cost import pipe_of, schedule_seconds
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.pipeline.schedule import bubble, in_slices, orders, timeline_of
from shoestring.training.planning.axes import kinds_of_workers
from shoestring.training.planning.plan import TrainingPlan, load_plan, plan_in
from shoestring.training.planning.planner import Planner
from shoestring.training.room import combinations
from shoestring.training.technique import TrainingTechnique as Technique

MB = 10**6


def small(batch: int = 8) -> Job:
    return gpt.job(width=64, depth=4, heads=2, context=32, batch=batch, steps=3)


def hardware(devices: int) -> Hardware:
    """Devices that are not here, with a link whose bytes and messages cost little."""
    return Hardware(
        device="cuda", memory=1 << 30, flops=1e10, base=0.0, described=True, links={str(devices): (1e-10, 1e-6, 0.0)}
    )


@cache
def planner(devices: int, batch: int = 8) -> Planner:
    """With techniques that can be rehearsed fast."""
    return Planner(
        small(batch),
        hardware(devices),
        devices=devices,
        catalogue=(Pipeline, Accumulate, Checkpoint, FusedOptimizer, DataParallel),
    )


@cache
def outcome(devices: int, megabytes: float) -> Outcome:
    return planner(devices).outcome(int(megabytes * MB))


def planned(devices: int, *techniques: Technique) -> TrainingPlan:
    return planner(devices).predictor.plan(requested_candidate(techniques, planner(devices).ledger()))


def test_where_data_parallel_does_not_fit_a_pipeline_is_found_and_explained() -> None:
    found = outcome(2, 2.8)
    chosen = found.chosen
    assert found.plain.predicted["process_bytes"] > 2.8 * MB >= chosen.predicted["process_bytes"]
    assert any(isinstance(one, Pipeline) for one in chosen.techniques)
    assert dict(chosen.details.mesh) == {"data": 1, "stage": 2, "tensor": 1}
    assert chosen.details.staging is not None and sum(chosen.details.staging.cut) == 4
    assert (
        "4 blocks are cut" in chosen.details.staging.why
        and "idle for" in chosen.details.staging.why
        and "DataParallel() needs" in chosen.details.staging.why
    )


def test_the_peak_of_a_plan_is_that_of_the_stage_that_needs_most_and_every_stage_has_its_own() -> None:
    plan = planned(2, Pipeline(2, 4, balance=(1, 3)))
    sizes = mesh_sizes(plan.techniques, 2)
    logs = [
        rehearse(replace(small(), mesh=imagined_mesh(sizes, rank)), plan.techniques, on_device=True)
        for rank in range(2)
    ]
    assert [one.ranks for one in plan.details.ranks] == [(0,), (1,)]
    assert [one.peak_bytes for one in plan.details.ranks] == [peak(log).bytes for log in logs]
    assert plan.predicted["peak_bytes"] == max(one.peak_bytes for one in plan.details.ranks)
    assert (
        plan.predicted["sent_bytes"] == plan.details.ranks[0].sent_bytes > 4 * 2 * 32 * 64 * 4
    )  # what crosses the cut, of all pieces


@pytest.mark.parametrize(
    "techniques",
    [
        (Pipeline(2, 4),),
        (Pipeline(2, 8, "zero-bubble"),),
        (Pipeline(2, 4, "interleaved", chunks=2),),
        (Pipeline(2, 4, balance=(3, 1)),),
        (Pipeline(2, 8), Checkpoint(every=1)),
    ],
)
def test_the_ledger_of_a_pipeline_is_close_to_its_rehearsal(techniques: tuple[Technique, ...]) -> None:
    """So that the ranking is worth something; weights that are elsewhere are not counted in either."""
    one = requested_candidate(techniques, planner(2).ledger())
    plan = planner(2).predictor.plan(one)
    assert one.known["peak_bytes"] == pytest.approx(plan.predicted["peak_bytes"], rel=0.1)
    assert one.known["sent_bytes"] == pytest.approx(plan.predicted["sent_bytes"], rel=0.01)


def test_on_four_workers_stages_and_copies_are_chosen_together() -> None:
    plan = planned(4, Pipeline(2, 4, balance=(2, 2)), DataParallel())
    assert dict(plan.details.mesh) == {"data": 2, "stage": 2, "tensor": 1} and plan.details.world == 4
    assert [one.ranks for one in plan.details.ranks] == [(0, 2), (1, 3)]
    deeper = planned(4, Pipeline(4, 4))
    assert dict(deeper.details.mesh) == {"data": 1, "stage": 4, "tensor": 1} and len(deeper.details.ranks) == 4
    assert deeper.predicted["peak_bytes"] < plan.predicted["peak_bytes"]
    every = list(combinations(planner(4).ledger(), planner(4).catalogue, Exactness.ROUNDING))
    stages = {next((one.stages for one in found.techniques if isinstance(one, Pipeline)), 1) for found in every}
    assert stages == {1, 2, 4} and len(every) < 5000
    for found in every:  # copies of the model are united, and lone copies are not
        lines = next((one.stages for one in found.techniques if isinstance(one, Pipeline)), 1)
        assert any(one.unites == "data" for one in uniting(found.techniques)) == (lines < 4)
        assert found.known["world"] == 4


def test_batches_with_fewer_samples_than_workers_are_planned_for_a_pipeline() -> None:
    found = planner(4, batch=2).outcome(1 << 30).chosen
    assert dict(found.details.mesh)["data"] <= 2 and any(isinstance(one, Pipeline) for one in found.techniques)
    assert found.details.staging is not None and "too few samples" in found.details.staging.why
    with pytest.raises(Mistake, match="batches of 2 samples for 4 workers"):
        planner(4, batch=2).outcome(1 << 30, (DataParallel(),))


def test_where_nothing_fits_the_least_that_works_is_told_with_all_its_stages() -> None:
    with pytest.raises(OverBudget, match="nothing fits") as error:
        planner(2).outcome(MB // 2)
    nearest = error.value.nearest
    assert isinstance(nearest, Plan) and nearest.predicted["process_bytes"] > MB // 2
    if any(isinstance(one, Pipeline) for one in nearest.techniques):
        assert len(nearest.details.ranks) == 2


def test_a_plan_with_a_cut_is_the_same_after_a_file(tmp_path: Path) -> None:
    plan = outcome(2, 2.8).chosen
    assert plan.details.mesh == {"data": 1, "stage": 2, "tensor": 1} and plan.details.staging is not None
    assert plan.details.staging.schedule in ("1f1b", "gpipe", "interleaved", "zero-bubble")
    assert sum(plan.details.staging.cut) == 4 and 0 < plan.details.staging.bubble < 1
    again = plan_in(json.loads(json.dumps(Outcome(plan).as_json())))
    assert (
        again.details.mesh == plan.details.mesh
        and again.details.ranks == plan.details.ranks
        and again.techniques == plan.techniques
    )
    assert (
        again.details.staging is not None
        and plan.details.staging is not None
        and again.details.staging.timeline == plan.details.staging.timeline
    )
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").details.mesh == plan.details.mesh


def test_the_timeline_of_a_plan_is_that_of_its_schedule_and_its_idle_share_the_formulas() -> None:
    even = Ledger(
        tuple(Block(f"b{number}", forward=1.0, backward=2.0, gradient=8.0) for number in range(8)),
        batch=4,
        at_zero_batch=tuple(Block(f"b{number}", gradient=8.0) for number in range(8)),
        standing=StandingBytes(parameters=64.0),
        workers=Workers(2, samples=16, own=8),
    )
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("naive", 1), ("zero-bubble", 1), ("interleaved", 2)):
        pipe = pipe_of(even, 2, 4, schedule, chunks)
        told = pipe.staging(pipe.largest())
        assert told.bubble == pytest.approx(bubble(schedule, 2, 4, chunks))
        assert max(work.end for own in told.timeline for work in own) == pytest.approx(pipe.step)
        assert pipe.largest().seconds == pytest.approx(pipe.step)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)]
    ),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 3),
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=18, max_size=18),
    st.floats(0, 3),
)
def test_a_schedule_is_played_as_it_is_timed(
    way: tuple[str, int], stages: int, pieces: int, slices: int, spent: list[tuple[float, float]], carried: float
) -> None:
    schedule, chunks = way
    slices = 1 if schedule == "zero-bubble" else slices

    def seconds(action: Action) -> float:
        forward, backward = spent[action.chunk]
        return forward if action.kind is Kind.FORWARD else backward if action.kind is Kind.BACKWARD else backward / 2

    spans = timeline_of(in_slices(orders(schedule, stages, pieces, chunks), slices), seconds, carried)
    played = schedule_seconds(schedule, stages, pieces, chunks, tuple(spent[: stages * chunks]), carried, slices)
    assert played == max(span.end for own in spans for span in own)


def test_workers_of_a_mesh_are_alike_if_they_hold_the_same_and_train_on_as_much() -> None:
    assert kinds_of_workers(small(batch=3), {"data": 2, "stage": 2, "tensor": 1}, serves=False) == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    assert kinds_of_workers(small(batch=4), {"data": 2, "stage": 2, "tensor": 1}, serves=False) == [(0, 2), (1, 3)]


def test_a_pipeline_that_can_not_be_is_refused_before_anything_is_made() -> None:
    ledger = planner(2).ledger()
    assert "can't be divided into pipelines of 3 stages" in Pipeline(3).refusal(ledger)
    assert "calls 4 blocks, and 8 parts" in Pipeline(2, 8, "interleaved", chunks=4).refusal(ledger)
    assert "places 3 blocks, and the model calls 4" in Pipeline(2, balance=(1, 2)).refusal(ledger)
