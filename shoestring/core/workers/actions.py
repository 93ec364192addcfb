"""Actions of workers that hold different layers of a model: forward and backward of each micro-batch, in order, with
times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights at once
    INPUTS = "I"  # gradients of the inputs, which the previous stage waits for
    WEIGHTS = "W"  # gradients of the weights, which nobody waits for


HALVES = (Kind.INPUTS, Kind.WEIGHTS)


@dataclass(frozen=True)
class Action:
    kind: Kind
    piece: int
    chunk: int

    def __hash__(self) -> int:  # without the kind, whose own hash is slow: a ranking looks up millions of them
        return hash((self.piece, self.chunk))


@dataclass(frozen=True)
class ActionSpan:
    """An action and when it happened, in seconds."""

    action: Action
    begin: float
    end: float


Timeline = tuple[tuple[ActionSpan, ...], ...]  # one row per worker, in order of time


def idle_share(timeline: Timeline, within: tuple[float, float] | None = None) -> float:
    """Fraction of the workers' time in which they are idle: from the first begin to the last end, or between the two
    times in `within`."""
    spans = [span for own in timeline for span in own]
    if not spans:
        return 0.0
    begin, end = within or (min(span.begin for span in spans), max(span.end for span in spans))
    busy = sum(max(0.0, min(span.end, end) - max(span.begin, begin)) for span in spans)
    return 1 - busy / (len(timeline) * (end - begin)) if end > begin else 0.0
