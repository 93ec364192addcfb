"""The interface of simulation methods: sequential (the plain loop), stacked and fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.federated.devices.records import Records
from shoestring.federated.round import Objective


class CohortUpdates(NamedTuple):
    """The result of training k devices."""

    rows: Tensor  # (k, size): weights afterwards minus weights before
    losses: Tensor  # (k) float64: mean training loss over samples
    steps: Tensor  # (k) int64: local steps


class CohortMethod(Protocol):
    """Trains k devices. `start`: (k, size), where each begins; `seeds`: for the order of each device's samples."""

    def train(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> CohortUpdates: ...


class Unsuitable(Exception):
    """The method can't train these devices; the text says why."""


class MethodDiffers(Exception):
    """The method's result is not that of the plain loop; the text says what differs."""


def refuse_unusual_steps(local: Local) -> None:
    """Raise Unsuitable for settings that only the plain loop supports."""
    if local.clip:
        raise Unsuitable(f"devices clip their gradients (clip={local.clip:g})")
    if local.schedule is not None:
        raise Unsuitable("the learning rate follows a schedule")
