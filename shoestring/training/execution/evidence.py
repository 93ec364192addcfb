"""What a worker process measures for the planner: one function per task."""

from __future__ import annotations

from itertools import islice

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import error_sentence
from shoestring.core.files.codec import from_json, to_json
from shoestring.data.lengths import batches_at, planned_batches, planned_for
from shoestring.measure.probe import measure_hardware
from shoestring.measure.tracker import Log
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.training.evidence.anchor import measure_anchor, why_not_again
from shoestring.training.evidence.fetching import seconds_waiting
from shoestring.training.evidence.rehearse import track
from shoestring.training.evidence.sample import sample_blocks
from shoestring.training.evidence.tasks import (
    AnchorResult,
    AnchorStep,
    AnchorTask,
    PiecesResult,
    PiecesTask,
    RehearseTask,
    SampleResult,
    SampleTask,
    StagesResult,
    StagesTask,
    techniques_of,
)
from shoestring.training.evidence.trials.pieces import QUICK, try_in_pieces
from shoestring.training.evidence.trials.stages import try_in_stages
from shoestring.training.execution.job_of_task import job_of
from shoestring.training.execution.tasks import DoctorTask, LinkSpeed, LinkSpeedTask
from shoestring.training.group_technique import StagedTechnique
from shoestring.training.links.link_speed import link_speed as measured_link_speed


def anchor(task: AnchorTask) -> AnchorResult:
    """One real step under each variant. Only the first must work: the others are for techniques that may be impossible
    here."""
    job = job_of(task)
    usual = (
        []
        if task.typical is None
        else list(islice(planned_batches(planned_for(job, batches_at(job, (task.typical,))[0])), 2))
    )
    steps: dict[str, AnchorStep] = {}
    for name, specs in task.variants.items():
        try:
            steps[name] = from_json(
                AnchorStep,
                to_json(
                    measure_anchor(job, techniques_of(specs), fresh_model(job), task.memory, usual, alone=task.alone)
                ),
            )
        except Exception as error:
            if name == "":
                raise
            steps[name] = AnchorStep(error=error_sentence(error))
    if task.memory:
        return AnchorResult(steps)
    # Last, because its memory must not count as the step's.
    plain, slow = techniques_of(task.variants[""]), steps[""].times["step"] > QUICK
    found = try_in_pieces(job, lambda: fresh_model(job), plain, slow) if task.pieces else {}
    again = "" if slow or plain or task.alone else why_not_again(job, fresh_model(job))
    return AnchorResult(steps, found, again, seconds_waiting(job, steps[""].times["step"]))


def pieces(task: PiecesTask) -> PiecesResult:
    job = job_of(task)
    return PiecesResult(try_in_pieces(job, lambda: fresh_model(job), techniques_of(task.techniques), task.small))


def stages(task: StagesTask) -> StagesResult:
    job = job_of(task)
    (technique,) = techniques_of(task.techniques)
    assert isinstance(technique, StagedTechnique), "the planner asks this of techniques that cut a model into stages"
    return try_in_stages(job, lambda: fresh_model(job), technique)


def sample(task: SampleTask) -> SampleResult:
    return from_json(SampleResult, to_json(sample_blocks(job_of(task))))


def rehearse(task: RehearseTask) -> Log:
    job = job_of(task)
    return track(job, techniques_of(task.techniques), fresh_model(job))


def link_speed(task: LinkSpeedTask) -> LinkSpeed:
    return LinkSpeed(*measured_link_speed(task.rank, task.world, task.same_machine, task.store))


def doctor(task: DoctorTask) -> Hardware:
    return measure_hardware(dtypes=True)
