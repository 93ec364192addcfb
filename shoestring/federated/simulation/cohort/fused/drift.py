"""The terms of an objective beside the loss (FedProx's pull, SCAFFOLD's correction), as a move of the weights before an
SGD step:

w  <-  w - rate (gradient + pull (w - anchor) + correction)   =   (w - rate (pull (w - anchor) + correction))  -  rate gradient
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoestring.federated.model.layout import Layout
from shoestring.federated.round import Objective


@dataclass(frozen=True)
class Drift:
    rate: float
    pull: float
    anchor: dict[str, Tensor]  # by the weight's name; empty: no pull
    correction: dict[str, Tensor]  # (k, ...) each, rows in the order of the stack; empty: none

    @property
    def active(self) -> bool:
        return bool(self.anchor or self.correction)

    def move(self, name: str, weight: Tensor, row: int) -> None:
        """Move one weight of one device, in place."""
        if self.anchor:
            weight.lerp_(self.anchor[name].view(weight.shape), self.rate * self.pull)
        if self.correction:
            weight.sub_(self.correction[name][row].view(weight.shape), alpha=self.rate)


def drift_of(objective: Objective, layout: Layout, index: Tensor) -> Drift:
    """The drift of an objective for a stack whose rows are the devices `index`."""
    trained = Layout(tuple(entry for entry in layout.entries if entry.trained))
    pulls = objective.pull and objective.anchor is not None
    anchor = trained.views(objective.anchor[: layout.trained_count]) if pulls and objective.anchor is not None else {}
    correction = {} if objective.correction is None else trained.views(objective.correction[index])
    return Drift(objective.local.rate, objective.pull, anchor, correction)
