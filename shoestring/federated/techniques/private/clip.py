"""Clip: no device's update is longer than a norm, so that what one device can change of a sum is limited.

    u_i  <-  u_i min(1, C / |u_i|)          |u_i| over all trained weights

Clip does it on the server, to what was decoded; DeviceClip on the device, before anything leaves it, for who adds noise there.
McMahan, Ramage, Talwar, Zhang 2018, Learning Differentially Private Recurrent Language Models, arXiv 1710.06963.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.federated.evidence import remembered, usual_norm
from shoestring.federated.round import Combined, DeviceGroup, DeviceView, Objective, Order, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.norms import clipped
from shoestring.federated.techniques.send.coding import recoded

NORM = "Clip.norm"  # of the server: the largest norm of an update in its last round; of an order of DeviceClip: the one to keep to


@dataclass(frozen=True)
class Clip(FederatedTechnique):
    """Shorten updates to a norm on the server.

    Costs: what long updates would have added.

    Not for: servers that must not see whole updates: use `DeviceClip`.
    """

    norm: float = 1.0

    why: ClassVar[str] = "no update is longer than a norm, which noise needs"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "clip"
    order: ClassVar[int] = 60

    def __post_init__(self) -> None:
        check_norm(self.norm, "norm", "Clip")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[Clip, ...]:
        """The usual length of an update, if noise is wanted."""
        if cost.wanted == inf or cost.evidence is None or cost.clip:
            return ()
        found = usual_norm(cost.evidence.decoded)
        return (cls(found),) if 0 < found < inf else ()

    def drift(self, cost: RoundCost, /) -> float:
        return within(cost, self.norm).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return within(cost, self.norm)

    def apply(self, subject: Round, /) -> Round:
        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(server, (replace(one, rows=clipped(one.rows, self.norm)[0]) for one in arriving))
            return replace(found, state={**found.state, NORM: as_tensor(self.norm)})

        return subject.with_(combine=combine)


@dataclass(frozen=True)
class DeviceClip(FederatedTechnique):
    """Shorten updates to a norm on the device.

    Costs: what long updates would have added.

    Not for: robustness against malicious devices, which do not clip: use `NormBound`.
    """

    norm: float = 1.0

    why: ClassVar[str] = "no update is longer than a norm before it leaves its device"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "clip"
    order: ClassVar[int] = 30

    def __post_init__(self) -> None:
        check_norm(self.norm, "norm", "DeviceClip")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[DeviceClip, ...]:
        return ()

    def drift(self, cost: RoundCost, /) -> float:
        return within(cost, self.norm).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        shorter = within(cost, self.norm)
        evidence = shorter.evidence and replace(shorter.evidence, values=shortened(shorter.evidence.values, self.norm))
        return replace(shorter, down=cost.down + as_tensor(self.norm).element_size(), evidence=evidence)

    def apply(self, subject: Round, /) -> Round:
        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, extras={**made.extras, NORM: as_tensor(self.norm)})

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(order, devices, objective)
            return replace(found, rows=clipped(found.rows, float(order.extras[NORM]))[0])

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(server, arriving)
            return replace(found, state={**found.state, NORM: as_tensor(self.norm)})

        return subject.with_(order=order, work=work, combine=combine)


def check_norm(norm: float, knob: str, name: str) -> None:
    if not 0 < norm < inf:
        raise Mistake(f"{knob}={norm!r} in {name}: it is the largest norm of an update; give a finite number above 0")


def as_tensor(norm: float) -> torch.Tensor:
    return torch.tensor(norm, dtype=torch.float64)


def within(cost: RoundCost, norm: float) -> RoundCost:
    """A cost whose updates are no longer than a norm; if none is known, all of them may be cut off."""
    clip = min(norm, cost.clip or inf)
    if cost.evidence is None:
        return replace(cost, clip=clip, error=max(cost.error, 1.0))
    return replace(recoded(cost, replace(cost.evidence, decoded=shortened(cost.evidence.decoded, norm))), clip=clip)


@remembered
def shortened(rows: torch.Tensor, norm: float) -> torch.Tensor:
    """Updates (m, size), clipped."""
    return clipped(rows, norm)[0]
