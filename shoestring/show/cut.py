"""Where a model is cut and how its workers are arranged, for terminal and page: predicted, and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoestring.core.units import bytes_text
from shoestring.core.workers.actions import Action, ActionSpan, Kind, Timeline
from shoestring.core.workers.coordinates import coordinates
from shoestring.core.workers.staging import Work
from shoestring.runs.events.event import StageTimes
from shoestring.runs.reports.plan_summary import CutPlan

WORDS = {
    "data": ("copy", "copies"),
    "stage": ("stage", "stages"),
    "tensor": ("part of every layer", "parts of every layer"),
}


@dataclass(frozen=True)
class StageRow:
    """What one stage holds."""

    stage: int
    blocks: int  # number of blocks
    names: str  # their names
    predicted: int | None  # peak tensor bytes of its largest worker
    measured: int | None

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            str(self.stage),
            str(self.blocks),
            self.names,
            *("" if size is None else bytes_text(size) for size in (self.predicted, self.measured)),
        )


@dataclass(frozen=True)
class ModelCut:
    """A model cut across workers."""

    sizes: Mapping[str, int]  # workers along each axis of the mesh
    schedule: str
    pieces: int
    why: str
    rows: tuple[StageRow, ...]
    predicted: Timeline
    measured: Timeline | None
    bubble: tuple[
        float | None, float | None
    ]  # fraction of a step in which workers wait: predicted, and measured (the median)
    step: int = 0  # the step of the measured timeline,
    steps: int = 0  # and the number of steps in the median
    one_clock: bool = True

    @property
    def mesh(self) -> str:
        return mesh_text(self.sizes)

    @property
    def way(self) -> str:
        """The schedule in words."""
        idle = self.bubble[0]
        waits = f", by which workers are predicted to wait for {100 * idle:.0f} % of a step" if idle is not None else ""
        return f"a batch in {self.pieces} pieces by the schedule {self.schedule}{waits}"

    @property
    def note(self) -> str:
        """Remarks on the measured timeline."""
        if self.measured is None:
            return ""
        share, count = (
            f"{100 * (self.bubble[1] or 0.0):.0f} %",
            f"of {self.steps} steps" if self.steps > 1 else "of one step",
        )
        clocks = (
            ""
            if self.one_clock
            else (
                "; machines have no clock in common: what they did is put together by the moment at which they "
                "added up the loss, and may be off by the time of a message"
            )
        )
        return f"the measured picture is of step {self.step}; workers waited for {share} of a step, the median {count}{clocks}"


def model_cut(plan: CutPlan, timed: StageTimes | None = None) -> ModelCut:
    """The cut of a plan, with its measurements."""
    return ModelCut(
        plan.mesh,
        plan.staging.schedule,
        plan.staging.pieces,
        plan.staging.why,
        tuple(stage_rows(plan, timed.peaks if timed is not None else ())),
        action_timeline(plan.staging.timeline),
        action_timeline(timed.timeline) if timed is not None and timed.timeline else None,
        (plan.staging.bubble, timed.idle if timed is not None else None),
        timed.step if timed is not None else 0,
        timed.steps if timed is not None else 0,
        timed is None or not timed.machines,
    )


def action_timeline(works: Sequence[Sequence[Work]]) -> Timeline:
    """
    >>> action_timeline([[Work("F", 0, 1, 0.0, 0.5)]])
    ((ActionSpan(action=Action(kind=<Kind.FORWARD: 'F'>, piece=0, chunk=1), begin=0.0, end=0.5),),)
    """
    return tuple(
        tuple(ActionSpan(Action(Kind(one.kind), one.piece, one.chunk), one.begin, one.end) for one in own)
        for own in works
    )


def stage_rows(plan: CutPlan, peaks: Sequence[int]) -> list[StageRow]:
    """What every stage holds. Chunks are assigned round-robin: with two per stage, the first of two stages holds the
    chunks 0 and 2."""
    stages, cut, names = plan.mesh["stage"], plan.staging.cut, plan.staging.blocks
    predicted = {rank: kind.peak_bytes for kind in plan.ranks for rank in kind.ranks}
    measured = dict(enumerate(peaks))

    def most(known: Mapping[int, int], stage: int) -> int | None:
        return max(
            (size for rank, size in known.items() if coordinates(plan.mesh, rank)["stage"] == stage), default=None
        )

    return [
        StageRow(
            stage,
            sum(cut[stage::stages]),
            ", ".join(filter(None, map(span_text, names[stage::stages]))),
            most(predicted, stage),
            most(measured, stage),
        )
        for stage in range(stages)
    ]


def span_text(names: Sequence[str]) -> str:
    """
    >>> span_text(["layers.0", "layers.1", "layers.2"]), span_text(["head"]), span_text([])
    ('layers.0 to layers.2', 'head', '')
    """
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """
    >>> mesh_text({"data": 2, "stage": 3, "tensor": 1}), mesh_text({"data": 4, "stage": 1, "tensor": 1})
    ('2 copies of the model x 3 stages', '4 copies of the model')
    """
    said = [
        f"{size} {WORDS[axis][size > 1]}{' of the model' if axis == 'data' else ''}"
        for axis, size in sizes.items()
        if axis in WORDS and size > 1
    ]
    return " x ".join(said) or "1 worker"
