"""Malicious devices: a fixed share of the simulated devices sends harmful updates. Who they are follows from the seed
and their names.

    sign-flip     - strength u                                     u: the device's honest update
    noise         N(0, (strength |u| / sqrt(size))^2)              random, and as long as u on average
    label-flip    the update after training on flipped classes, y -> classes - 1 - y
    replacement   strength (x - w)                                 x: weights trained on flipped classes; a large strength replaces the mean

Malicious devices ignore clipping. Honest devices send the same bits as without this technique. Extras of other
techniques stay honest.
Bagdasaryan, Veit, Hua, Estrin, Shmatikov 2020, How To Backdoor Federated Learning, arXiv 1807.00459 (replacement);
Tolpegin, Truex, Gursoy, Liu 2020, Data Poisoning Attacks Against Federated Learning Systems, arXiv 2007.08432 (label
flip).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.model.layout import Layout
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import DeviceView, Objective, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.behaviour.flip_classes import check_classes, flip_classes
from shoestring.federated.techniques.send.coding import without_clip

USUAL = {"sign-flip": 1.0, "label-flip": 1.0, "noise": 1.0, "replacement": 10.0}  # default strength of every attack


@dataclass(frozen=True)
class Malicious(FederatedTechnique):
    """Let a share of the simulated devices send harmful updates.

    Costs: what the attack does to the model.

    Not for: anything but tests of robust rules: it is an attack, and simulation only.
    """

    share: float = 0.2  # of all devices
    attack: str = "sign-flip"
    strength: float = 0.0  # 0: the attack's default
    classes: int = 0  # number of classes, for flipping; 0: the number of outputs of the model's last layer

    why: ClassVar[str] = "simulated devices that do harm"
    seam: ClassVar[str] = "devices"
    slot: ClassVar[str] = "malicious"
    order: ClassVar[int] = 35
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise Mistake(
                f"share={self.share} in Malicious: it is the share of devices that are malicious; give 0 to 1"
            )
        if self.attack not in USUAL:
            raise Mistake(f"attack={self.attack!r} in Malicious: there are {', '.join(USUAL)}")
        if not 0 <= self.strength < inf:
            raise Mistake(
                f"strength={self.strength} in Malicious: give a number above 0, or leave it out for the attack's default"
            )
        if self.strength and self.attack == "label-flip":
            raise Mistake(
                f"strength={self.strength} in Malicious: label-flip has no strength; use attack='replacement', which scales the "
                f"update from flipped classes"
            )
        if self.classes < 0 or self.classes == 1:
            raise Mistake(f"classes={self.classes} in Malicious: it is the number of classes; give 2 or more")

    def cost(self, cost: RoundCost, /) -> RoundCost:
        """Malicious devices don't clip, so only a clip on the server bounds what they send."""
        return without_clip(cost) if self.share else cost

    def exactness(self, cost: RoundCost, /) -> Exactness:
        return Exactness.CHANGED if self.share else Exactness.BITS

    def apply(self, subject: Round, /) -> Round:
        classes = self.classes or output_count(subject.layout)

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            harmful = [is_malicious(self.share, order.seed, device.name) for device in devices]
            if self.attack in ("label-flip", "replacement"):
                for device in (
                    devices
                ):  # check all devices: if only malicious ones failed, a job without classes would seem to work
                    check_classes(device.records, classes)
                devices = [
                    replace(device, records=flip_classes(device.records, classes)) if harm else device
                    for device, harm in zip(devices, harmful, strict=True)
                ]
            found = subject.work(order, devices, objective)
            if self.attack == "label-flip" or not any(harmful):
                return found
            rows = found.rows.clone()
            for place, device in enumerate(devices):
                if harmful[place]:
                    rows[place] = self.attack_row(rows[place], order, device.name)
            return replace(found, rows=rows)

        return subject.with_(work=work)

    def attack_row(self, row: Tensor, order: Order, name: str) -> Tensor:
        """The row that a malicious device sends in place of its honest update."""
        strength = self.strength or USUAL[self.attack]
        if self.attack == "noise":
            drawn = torch.randn(row.shape, generator=generator_of(order.seed, "malicious noise", order.round, name))
            return drawn * (strength * float(row.norm()) / sqrt(row.numel()))
        return row * (-strength if self.attack == "sign-flip" else strength)


def is_malicious(share: float, seed: int, name: str) -> bool:
    """Whether a device is malicious: the same answer in every round."""
    return float(torch.rand((), dtype=torch.float64, generator=generator_of(seed, "malicious", name))) < share


def output_count(layout: Layout) -> int:
    """Number of outputs of the model's last layer."""
    last = [entry for entry in layout.entries if entry.trained][-1]
    return last.shape[0] if last.shape else 1
