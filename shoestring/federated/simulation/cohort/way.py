"""A way to train devices: what the plain loop, the stacked forward and the hand-written steps have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from shoestring.core.local import Local
from shoestring.federated.records import Records
from shoestring.federated.round import Objective


class Moved(NamedTuple):
    """What the work of k devices comes to."""

    rows: Tensor  # (k, size): their weights after it minus those before
    losses: Tensor  # (k) float64: mean training loss of their steps, by samples
    steps: Tensor  # (k) int64


class CohortMethod(Protocol):
    """`start`: (k, size), where each device begins; `seeds`: of the order of each one's samples."""

    def moved(self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]) -> Moved: ...


class Unsuitable(Exception):
    """This way can't train that; the text says why."""


class Differs(Exception):
    """Devices' work in this way is not what the plain loop gives; the text says what differs."""


def check_steps(local: Local) -> None:
    """Refuse what only the plain loop does in a step."""
    if local.clip:
        raise Unsuitable(f"every device's gradients are clipped (clip={local.clip:g})")
    if local.schedule is not None:
        raise Unsuitable("the rate follows a schedule")
