"""What follows when workers of a group ended: decided here from plain values, done by the supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from shoestring.processes.messages import Failure, WorkerDied

TRIES = 3  # deaths in a row without a new step, after which it is given up


class Decision(Enum):
    FAIL = auto()  # an error that would come again ends the group
    STOP = auto()  # somebody asked for it, and there is nobody left to save
    OUT_OF_MEMORY = auto()  # the kernel took a worker
    GIVE_UP = auto()  # it died too often, or would wait in vain again
    RESTART = auto()  # the group is formed again from the last checkpoint


@dataclass(frozen=True)
class Setback:
    """What is known when workers ended badly."""

    failures: Sequence[Failure] = ()  # that workers told, first one first
    asked_to_stop: bool = False
    deaths: Sequence[WorkerDied] = ()  # none: the workers only lost each other
    kernel_killed: bool = False  # the kernel has killed for want of memory since the round began
    restarts: int = 1  # times that the group is formed again, with this one
    limit: int = 10  # of restarts
    fruitless: int = 1  # such times since the last new step, with this one
    in_vain: bool = (
        False  # in a trial, which begins anew every time, a worker waited until its deadline and nobody died
    )


def decided(setback: Setback) -> Decision:
    """What follows. What would come again comes before what may not."""
    if setback.failures:
        return Decision.FAIL
    if setback.asked_to_stop:
        return Decision.STOP
    if setback.kernel_killed and any(death.why == "SIGKILL" for death in setback.deaths):
        return Decision.OUT_OF_MEMORY
    if setback.in_vain or setback.fruitless >= TRIES or setback.restarts > setback.limit:
        return Decision.GIVE_UP
    return Decision.RESTART
