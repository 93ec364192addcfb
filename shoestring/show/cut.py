"""Where a model is cut and how its workers stand, as a terminal and a page tell it: what is predicted, beside what was measured.

Read from JSON by the keys of `runs/report.py`; what a plan has as a number there, a report has as {"predicted", "measured"}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoestring.core.actions import Action, ActionSpan, Kind, Timeline
from shoestring.core.codec import Unreadable
from shoestring.core.coordinates import coordinates
from shoestring.core.staging import Work
from shoestring.core.units import bytes_text

WORDS = {
    "data": ("copy", "copies"),
    "stage": ("stage", "stages"),
    "tensor": ("part of every layer", "parts of every layer"),
}


@dataclass(frozen=True)
class StageRow:
    """What one stage holds."""

    stage: int
    blocks: int  # how many
    names: str  # which
    predicted: int | None  # bytes of tensors at most, of its largest worker
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
    """A model that is cut."""

    sizes: Mapping[str, int]  # the mesh
    schedule: str
    pieces: int
    why: str
    rows: tuple[StageRow, ...]
    predicted: Timeline
    measured: Timeline | None
    bubble: tuple[
        float | None, float | None
    ]  # share of a step in which workers wait: predicted, and measured as the median
    step: int = 0  # that the measured timeline is of,
    steps: int = 0  # and how many steps the median is of
    one_clock: bool = True

    @property
    def mesh(self) -> str:
        return mesh_text(self.sizes)

    @property
    def way(self) -> str:
        """How a batch goes through the stages."""
        idle = self.bubble[0]
        waits = f", by which workers are predicted to wait for {100 * idle:.0f} % of a step" if idle is not None else ""
        return f"a batch in {self.pieces} pieces by the schedule {self.schedule}{waits}"

    @property
    def note(self) -> str:
        """What to know of the measured timeline."""
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


def cut_in(told: Mapping[str, Any]) -> ModelCut | None:
    """The cut that a plan or a report tells of; None where there is none, or none that can be read."""
    try:
        if "cut" not in told:
            return None
        sizes = {str(axis): int(size) for axis, size in told["mesh"].items()}
        bubble, timeline = both(told["bubble"]), both(told.get("timeline", ()))
        measured = timeline_in(timeline["measured"]) if timeline.get("measured") else None
        return ModelCut(
            sizes,
            str(told["schedule"]),
            int(told["pieces"]),
            str(told.get("cut_why", "")),
            tuple(stage_rows(told, sizes)),
            timeline_in(timeline["predicted"] or ()),
            measured,
            (bubble["predicted"], bubble.get("measured")),
            int(timeline.get("step", 0)),
            int(timeline.get("steps", 0)),
            timeline.get("one_clock", True) is True,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, Unreadable):
        return None


def both(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {"predicted": found}


def timeline_in(works: Sequence[Sequence[Any]]) -> Timeline:
    """
    >>> timeline_in([[["F", 0, 1, 0.0, 0.5]]])
    ((ActionSpan(action=Action(kind=<Kind.FORWARD: 'F'>, piece=0, chunk=1), begin=0.0, end=0.5),),)
    """
    return tuple(
        tuple(
            ActionSpan(Action(Kind(one.kind), one.piece, one.chunk), one.begin, one.end)
            for one in map(Work.from_json, own)
        )
        for own in works
    )


def stage_rows(told: Mapping[str, Any], sizes: Mapping[str, int]) -> list[StageRow]:
    """What every stage holds. Chunks go round: with two of them each, the first of two stages holds the chunks 0 and 2."""
    stages, cut = sizes["stage"], [int(size) for size in told["cut"]]
    names = [[str(name) for name in own] for own in told.get("cut_blocks", ())]
    predicted = {int(rank): int(kind["peak_bytes"]) for kind in told.get("ranks", ()) for rank in kind["ranks"]}
    predicted |= {
        int(one["rank"]): int(one["predicted"]["peak_bytes"]) for one in told.get("workers", ()) if one["predicted"]
    }
    measured = {rank: int(size) for rank, size in enumerate(told.get("peaks", ()))}

    def most(known: Mapping[int, int], stage: int) -> int | None:
        return max((size for rank, size in known.items() if coordinates(sizes, rank)["stage"] == stage), default=None)

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
