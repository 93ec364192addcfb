"""What to do when workers of a group ended: decided here from plain values, carried out by the supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from shoestring.processes.messages import Failure, WorkerDied

TRIES = 3  # deaths in a row without a new step, after which the group gives up


class Decision(Enum):
    FAIL = auto()  # the error would happen again
    STOP = auto()  # stop requested, and no worker is left that could save
    OUT_OF_MEMORY = auto()  # the kernel killed a worker for lack of memory
    GIVE_UP = auto()  # too many deaths, or another wait in vain
    RESTART = auto()  # form the group again from the last checkpoint


@dataclass(frozen=True)
class Setback:
    """What is known after workers failed."""

    failures: Sequence[Failure] = ()  # reported by workers, the first one first
    asked_to_stop: bool = False
    deaths: Sequence[WorkerDied] = ()  # empty: the workers only lost each other
    kernel_killed: bool = False  # the kernel killed a process for lack of memory since the round began
    restarts: int = 1  # number of restarts, including this one
    limit: int = 10  # largest number of restarts
    fruitless: int = 1  # restarts since the last new step, including this one
    in_vain: bool = (
        False  # in a trial, which always starts from the beginning: a worker waited until its deadline, and nobody died
    )


def decide(setback: Setback) -> Decision:
    """What to do. Causes that would happen again are tested before those that may not."""
    if setback.failures:
        return Decision.FAIL
    if setback.asked_to_stop:
        return Decision.STOP
    if setback.kernel_killed and any(death.why == "SIGKILL" for death in setback.deaths):
        return Decision.OUT_OF_MEMORY
    if setback.in_vain or setback.fruitless >= TRIES or setback.restarts > setback.limit:
        return Decision.GIVE_UP
    return Decision.RESTART
