"""The size of a process besides its tensors, and how it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoestring.measure.timeline import peak
from shoestring.measure.tracker import VALIDATE, Log, Moment
from shoestring.training.planning.plan import ProcessBasis


class ProcessFigure(NamedTuple):
    """Bytes of a process, and how they are known."""

    bytes: float
    basis: ProcessBasis
    how: str


def process_estimate(size: float, why: str) -> ProcessFigure:
    return ProcessFigure(size, ProcessBasis.ESTIMATED, f"estimated{why}")


def expected_process(log: Log) -> float:
    """Bytes of a process with these tensors, before any measurement: rather too many."""
    return peak(log).bytes * 1.35 + 5e8


def overhead(known: Mapping[str, int], moment: Moment, base: int) -> int:
    """Bytes of the process above its tensors at a moment; for an unmeasured validation, those of the same block's
    forward."""
    forward = known.get(f"forward {moment.block}", base) if moment.phase == VALIDATE else base
    return known.get(" ".join(moment), forward)
