"""Local fine-tuning: how good the common weights become for a device that tunes them on its own records.

    before   metrics of the weights that the device was given, on what it holds out
    after    the same after `epochs` epochs of plain local training from them
    time     + epochs / (epochs of a round) of a device's local work, where it is judged

It is done in rounds in which devices are judged, and nothing of it is kept or sent: the round's own work is the same bits.
Yu, Bagdasaryan, Shmatikov 2020, Salvaging Federated Learning by Local Adaptation, arXiv 2002.04758.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.federated.round import DeviceView, Objective, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.work.beside import without_traces


@dataclass(frozen=True)
class FineTune(FederatedTechnique):
    epochs: int = 1  # of tuning

    why: ClassVar[str] = "devices are judged after tuning the common weights on their own records"
    seam: ClassVar[str] = "work"
    order: ClassVar[int] = 19
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise Mistake(
                f"epochs={self.epochs} in FineTune: it is how often a device goes through its records; give 1 or more"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[FineTune, ...]:
        return ()

    def apply(self, subject: Round, /) -> Round:
        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(replace(order, judges=False), devices, objective)
            if not order.judges:
                return found
            tuning = Objective(
                replace(objective.local, epochs=self.epochs, steps=0), order.weights.expand(len(devices), -1)
            )
            tuned = subject.work(order, without_traces(devices), tuning)
            return replace(found, before=tuned.before, after=tuned.after)

        return subject.with_(work=work)
