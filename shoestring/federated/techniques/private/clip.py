"""Clip: bound the norm of every client update, which bounds how much one device can change the sum (its sensitivity).

    u_i  <-  u_i min(1, C / |u_i|)          |u_i| over all trained weights

Clip runs on the server after decoding. DeviceClip runs on the device before encoding; DeviceNoise needs it.
McMahan, Ramage, Talwar, Zhang 2018, Learning Differentially Private Recurrent Language Models, arXiv 1710.06963.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.federated.planning.evidence import cache_by_identity, median_norm
from shoestring.federated.round import Combined, DeviceGroup, DeviceView, Objective, Order, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.norms import clip_to_norm
from shoestring.federated.techniques.send.coding import replace_evidence

NORM = "Clip.norm"  # key of the clipping norm: in the server's state, that of the last round; in an order, the one for DeviceClip


@dataclass(frozen=True)
class Clip(FederatedTechnique):
    """Shorten updates to a norm on the server.

    Costs: what long updates would have added.

    Not for: servers that must not see whole updates: use `DeviceClip`.
    """

    norm: float = 1.0

    why: ClassVar[str] = "bounds the norm of every update, which noise needs"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "clip"
    order: ClassVar[int] = 60

    def __post_init__(self) -> None:
        check_norm(self.norm, "norm", "Clip")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[Clip, ...]:
        """The median norm of an update, if an epsilon is asked for."""
        if cost.wanted == inf or cost.evidence is None or cost.clip:
            return ()
        found = median_norm(cost.evidence.decoded)
        return (cls(found),) if 0 < found < inf else ()

    def drift(self, cost: RoundCost, /) -> float:
        return cost_with_clip(cost, self.norm).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost_with_clip(cost, self.norm)

    def apply(self, subject: Round, /) -> Round:
        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(
                server, (replace(one, rows=clip_to_norm(one.rows, self.norm)[0]) for one in arriving)
            )
            return replace(found, state={**found.state, NORM: as_tensor(self.norm)})

        return subject.with_(combine=combine)


@dataclass(frozen=True)
class DeviceClip(FederatedTechnique):
    """Shorten updates to a norm on the device.

    Costs: what long updates would have added.

    Not for: robustness against malicious devices, which do not clip: use `NormBound`.
    """

    norm: float = 1.0

    why: ClassVar[str] = "bounds the norm of every update before it leaves its device"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "clip"
    order: ClassVar[int] = 30
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_norm(self.norm, "norm", "DeviceClip")

    def drift(self, cost: RoundCost, /) -> float:
        return cost_with_clip(cost, self.norm).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        shorter = cost_with_clip(cost, self.norm)
        evidence = shorter.evidence and replace(
            shorter.evidence, values=clip_evidence(shorter.evidence.values, self.norm)
        )
        return replace(shorter, down=cost.down + as_tensor(self.norm).element_size(), evidence=evidence)

    def apply(self, subject: Round, /) -> Round:
        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, extras={**made.extras, NORM: as_tensor(self.norm)})

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(order, devices, objective)
            return replace(found, rows=clip_to_norm(found.rows, float(order.extras[NORM]))[0])

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(server, arriving)
            return replace(found, state={**found.state, NORM: as_tensor(self.norm)})

        return subject.with_(order=order, work=work, combine=combine)


def check_norm(norm: float, knob: str, name: str) -> None:
    if not 0 < norm < inf:
        raise Mistake(f"{knob}={norm!r} in {name}: it is the largest norm of an update; give a finite number above 0")


def as_tensor(norm: float) -> torch.Tensor:
    return torch.tensor(norm, dtype=torch.float64)


def cost_with_clip(cost: RoundCost, norm: float) -> RoundCost:
    """The cost with clipped updates. Without evidence it assumes the worst: that clipping removes everything."""
    clip = min(norm, cost.clip or inf)
    if cost.evidence is None:
        return replace(cost, clip=clip, error=max(cost.error, 1.0))
    return replace(
        replace_evidence(cost, replace(cost.evidence, decoded=clip_evidence(cost.evidence.decoded, norm))), clip=clip
    )


@cache_by_identity
def clip_evidence(rows: torch.Tensor, norm: float) -> torch.Tensor:
    """The updates (m, size) of the evidence, clipped."""
    return clip_to_norm(rows, norm)[0]
