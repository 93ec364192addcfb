"""Local fine-tuning: personalization measured as the shared weights after each device fine-tuned them on its own
records.

    before   held-out metrics of the shared weights
    after    held-out metrics after `epochs` epochs of plain local training from them

    time     + epochs / (epochs of a round) of a device's local work, where it is judged

It runs in rounds with an evaluation. Nothing of it is kept or sent, so the shared model gets the same bits. Each
evaluation costs a device the time of so many epochs.
Yu, Bagdasaryan, Shmatikov 2020, Salvaging Federated Learning by Local Adaptation, arXiv 2002.04758.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.federated.round import DeviceView, Objective, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.local_training.separate_state import with_copied_state


@dataclass(frozen=True)
class FineTune(FederatedTechnique):
    """Judge the common weights after each device tuned them on its own records.

    Costs: so many epochs of work on every device that is judged.

    Not for: models that go to devices as they are.
    """

    epochs: int = 1  # of fine-tuning

    why: ClassVar[str] = "evaluates devices after fine-tuning the shared weights on their own records"
    seam: ClassVar[str] = "work"
    order: ClassVar[int] = 19
    exact: ClassVar[bool] = True
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise Mistake(
                f"epochs={self.epochs} in FineTune: it is the number of passes over a device's records; give 1 or more"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost

    def apply(self, subject: Round, /) -> Round:
        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(replace(order, judges=False), devices, objective)
            if not order.judges:
                return found
            tuning = Objective(
                replace(objective.local, epochs=self.epochs, steps=0), order.weights.expand(len(devices), -1)
            )
            tuned = subject.work(order, with_copied_state(devices), tuning)
            return replace(found, before=tuned.before, after=tuned.after)

        return subject.with_(work=work)
