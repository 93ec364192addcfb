"""Real steps of a job, measured by the worker: a whole step, with memory-saving techniques if needed, or one block of
each kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from shoestring.core.errors import NotRepeatable
from shoestring.core.files.codec import to_json
from shoestring.core.technique import in_order
from shoestring.measure.process import memory_free
from shoestring.measure.timeline import blocks_of, peak
from shoestring.measure.tracker import Log
from shoestring.training.catalogue import CATALOGUE, close_environment
from shoestring.training.evidence.rehearsals import PATIENCE, Rehearsals
from shoestring.training.evidence.step import Anchor, anchor_of_sample, first_batch
from shoestring.training.evidence.tasks import AnchorResult, AnchorStep, AnchorTask, SampleTask, specs_of
from shoestring.training.group_technique import uniting
from shoestring.training.technique import TrainingTechnique as Technique

SAMPLE = 3 << 28  # bytes: a larger block is not allocated just to be timed
UNTRIED = {"not tried": "no real step could be run here"}


@dataclass(frozen=True)
class RealSteps:
    """The results of real steps."""

    anchors: Mapping[str, Anchor] = field(default_factory=dict)  # by variant; "": plain
    failed: Mapping[str, str] = field(default_factory=dict)  # variants that can't run -> why
    pieces: Mapping[str, str] = field(
        default_factory=lambda: UNTRIED
    )  # what changes with two micro-batches: trait -> observation
    again: str = ""  # why blocks can't be recomputed
    reserved: int = 0  # bytes of address space that a worker needs above its memory


@dataclass(frozen=True)
class Needs:
    """What to measure beside the times of a step."""

    sizes: bool = True  # where memory goes, to predict processes with other allocators
    pieces: bool = True  # whether a batch in two micro-batches gives the same numbers
    techniques: bool = True  # operations and smaller batches that techniques' figures are made of


def needs_of(only: tuple[Technique, ...] | None) -> Needs:
    """What must be measured to predict these techniques alone; None: any technique may be chosen."""
    if only is None:
        return Needs()
    united = bool(uniting(only))
    return Needs(
        united or any(one.predictable or one.environment for one in only),
        united or any(one.splits_batch for one in only),
        bool(only),
    )


def real_steps(
    rehearsals: Rehearsals, plain: Log, variants: Iterable[Technique], splittable: bool, needs: Needs
) -> RealSteps:
    """Measured steps, plain and under each variant; empty where no step can run."""
    environment = rehearsals.hardware.environment
    if rehearsals.worker is None or rehearsals.job.origin is None:
        return RealSteps()
    extra = easing_techniques(rehearsals, plain, splittable)
    if extra is None:
        return sample(rehearsals, plain)
    wanted = {"": extra} | {variant.key: in_order((*extra, variant)) for variant in variants}
    specs = {key: specs_of(techniques) for key, techniques in wanted.items()}
    try:
        typical = None if rehearsals.job.largest is None else rehearsals.lengths.typical
        alone = not (needs.techniques or extra or len(wanted) > 1)
        timing = AnchorTask(**rehearsals.about_job(), variants=specs, pieces=needs.pieces, typical=typical, alone=alone)
        question = {"times": to_json(specs), "alone": alone}
        timed = with_same_times(
            rehearsals, plain, question, rehearsals.ask_worker(timing, environment, "measuring a real step")
        )
    except NotRepeatable as error:
        if not extra:
            raise
        return RealSteps(again=str(error))  # blocks can't be recomputed, and the model is too large for a plain step
    close = {**environment, **close_environment()}
    tensors = peak(rehearsals.log(extra)).bytes if extra else peak(plain).bytes
    pieces = next((technique.parts for technique in extra if technique.splits_batch), 1)
    first = timed.steps[""]
    if needs.sizes or extra:  # a plan that does not fit here can't be tried, and is estimated from this
        sizing = AnchorTask(**rehearsals.about_job(), variants={"": specs[""]}, memory=True, typical=typical)
        sized = rehearsals.ask_worker(sizing, close, "measuring where the memory of a real step goes").steps[""]
    else:
        sized = AnchorStep(first.times, overheads={"": max(first.process - tensors, 0)})
    anchors = {
        key: Anchor(
            one.times,
            one.paces,
            one.adding,
            one.probes,
            sized.times["step"],
            first.process,
            tensors,
            sized.overheads,
            sized.filled,
            pieces,
            bool(extra),
            spread=first.spread,
            busy=first.busy,
            waiting=timed.waiting,
            validation_seconds=one.validation_seconds,
            validation_bytes=sized.validation_bytes,
        )
        for key, one in timed.steps.items()
        if not one.error
    }
    failed = {key: one.error for key, one in timed.steps.items() if one.error}
    return RealSteps(anchors, failed, timed.pieces, timed.again, first.reserved)


def alike(one: float, other: float) -> bool:
    """Whether two jobs whose steps are the same may wait as long for their data, as far as one look can tell.

    >>> alike(0.0001, 0.0007), alike(0.2, 0.25), alike(0.001, 0.2)
    (True, True, False)
    """
    return max(one, other) <= 2 * min(one, other) + 1e-3


def with_same_times(
    rehearsals: Rehearsals, plain: Log, question: Mapping[str, Any], measured: AnchorResult
) -> AnchorResult:
    """The measurements, with the seconds replaced by those first measured for the same step. Sizes and trials are this
    job's own: a number in the job may change them without changing the step's log."""
    if rehearsals.kept is None or rehearsals.real:
        return measured
    first = rehearsals.kept.same_times(plain, question, measured)
    steps = {
        key: replace(
            one,
            times=known.times,
            spread=known.spread,
            busy=known.busy,
            paces=known.paces,
            adding=known.adding,
            probes=known.probes,
            validation_seconds=known.validation_seconds,
        )
        if (known := first.steps.get(key, one)).error == one.error == ""
        else one
        for key, one in measured.steps.items()
    }
    waiting = first.waiting if alike(first.waiting, measured.waiting) else measured.waiting
    return replace(measured, steps=steps, waiting=waiting)


def easing_techniques(rehearsals: Rehearsals, plain: Log, splittable: bool) -> tuple[Technique, ...] | None:
    """Techniques under which a real step fits this machine; None if none do, or it would take too long."""
    flops = sum(plain.flops.values()) / 2
    if flops / rehearsals.hardware.flops > PATIENCE:
        return None
    free = 0.8 * memory_free()
    tries: list[tuple[Technique, ...]] = [()]
    if splittable:
        samples = rehearsals.job.count(first_batch(rehearsals.job))
        easing = product(*filter(None, (kind.easing(samples) for kind in CATALOGUE)))
        tries += [techniques for techniques in easing if any(one.splits_batch for one in techniques)]
    for techniques in tries:
        with suppress(Exception):  # a technique that is impossible for this model is no way to run its step
            need = peak(plain).bytes * 1.5 if not techniques else peak(rehearsals.log(techniques)).bytes * 2
            if need + 1e9 < free:
                return techniques
    return None


def sample(rehearsals: Rehearsals, plain: Log) -> RealSteps:
    """An anchor made from one block of each kind, where a whole step is too large and a block is not."""
    assert rehearsals.worker is not None, "samples run in a child process"
    largest = max((block.gradient + block.kept for block in blocks_of(plain) if block.inside), default=0)
    if not largest or rehearsals.real or 2 * largest > SAMPLE:
        return RealSteps()
    found = rehearsals.ask_worker(
        SampleTask(**rehearsals.about_job()),
        {**rehearsals.hardware.environment, **close_environment()},
        "timing one block of each kind",
    )
    return RealSteps({"": anchor_of_sample(found, plain)}, reserved=found.reserved)
