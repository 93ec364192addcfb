"""How a plan cuts a model across workers, and when each of them does what: what a technique that does so tells of itself."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Work(NamedTuple):
    """Something that a worker does in a step, and when, in seconds from its beginning."""

    kind: str     # F: forward; B: backward; I and W: its halves, to what came in and to the weights
    piece: int
    chunk: int    # of the model
    begin: float
    end: float


@dataclass(frozen=True)
class Staging:
    cut: tuple[int, ...]        # blocks of every chunk of the model, in the order in which they run
    schedule: str
    pieces: int                 # of a batch
    bubble: float               # share of a step's time in which workers wait for each other; of all of them
    timeline: tuple[tuple[Work, ...], ...] = ()   # of every worker along the stages
    memory: tuple[float, ...] = ()                # bytes of tensors that each of them needs, by the ledger
    why: str = ""               # why it is cut there, in a sentence

    def slower(self, factor: float) -> Staging:
        """The same where everything takes so many times as long."""
        return replace(self, timeline=tuple(tuple(work._replace(begin=work.begin * factor, end=work.end * factor) for work in own)
                                            for own in self.timeline))
