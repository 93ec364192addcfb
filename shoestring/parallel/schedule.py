"""Schedules of a pipeline: who does what when, as pure functions of the number of workers and pieces.

A model is cut into *chunks*, one after the other; with V chunks each, worker w of S holds the chunks w, w + S, w + 2 S, ... A batch goes
through them in *pieces*. An order is what every worker does, one action after the other; data that an action needs are waited for.
"""
from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"    # of inputs and weights at once
    INPUTS = "I"      # backward to what came in, which the worker before waits for
    WEIGHTS = "W"     # the rest of it, for which nobody waits


@dataclass(frozen=True)
class Action:
    kind: Kind
    piece: int
    chunk: int


Orders = tuple[tuple[Action, ...], ...]   # of every worker
