"""Ditto: personalization by a second model on every device, which a penalty keeps near the shared one.

    v_i  minimises   F_i(v)  +  strength/2 |v - w_t|^2         as many steps as the round's own training, from last round's v_i

The personal model begins as the first weights that the device receives. Nothing more is sent, and the shared model gets
the same bits. In evaluations, `before` is of the shared weights and `after` of the personal models.
Li, Hu, Beirami, Smith 2021, Ditto: Fair and Robust Federated Learning Through Personalization, arXiv 2012.04221.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.federated.round import DeviceView, Objective, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.local_training.separate_state import with_copied_state

PERSONAL = "Ditto.personal"  # key of the personal weights (size) in a device's state


@dataclass(frozen=True)
class Ditto(FederatedTechnique):
    """Train a personal model on every device beside the common one.

    Costs: twice the work on a device, and a second model kept there.

    Not for: devices without time or room for a second model; `FineTune` keeps nothing.
    """

    strength: float = 0.1  # of the pull towards the shared weights; 0: personal models train independently

    why: ClassVar[str] = "a personal model on every device, near the shared one"
    seam: ClassVar[str] = "work"
    order: ClassVar[int] = 18
    exact: ClassVar[bool] = True
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.strength < inf:
            raise Mistake(
                f"strength={self.strength} in Ditto: it pulls personal models towards the shared one; give 0 or more"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return replace(cost, device_seconds=2 * cost.device_seconds, device_bytes=cost.device_bytes + 4 * cost.size)

    def apply(self, subject: Round, /) -> Round:
        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(order, devices, objective)
            if objective.start is not None:
                return found
            start = torch.stack([device.state.get(PERSONAL, order.weights) for device in devices])
            near, apart = (
                Objective(objective.local, start, self.strength, order.weights, model=PERSONAL),
                with_copied_state(devices),
            )
            personal = subject.work(order, apart, near)
            for device, other, own in zip(devices, apart, start + personal.rows, strict=True):
                device.state[PERSONAL] = own.clone()
                device.state.update(
                    {name: value for name, value in other.state.items() if name.startswith(f"{PERSONAL}.")}
                )  # statistics
            return replace(found, after=personal.after) if order.judges else found

        return subject.with_(work=work)
