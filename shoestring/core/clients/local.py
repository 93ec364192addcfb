"""What a device does with its own records in a federated round, and rules that divide records among devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoestring.core.clients.statistics import StatisticsRule
from shoestring.core.errors import Mistake

RATE = 0.05


@dataclass(frozen=True)
class Local:
    """The work of one device in one round: `Job(local=Local(epochs=1, batch=10, lr=0.05))`.

    epochs, steps   rounds of its own records, and the most steps (0: as many as the epochs make)
    batch           records per step; the last batch of an epoch may be smaller. 0: all records
    lr, optimizer   plain SGD with this rate, or the result of `optimizer(parameters)`; its moments start anew in every round. If neither
                    is given, the Job's optimizer; without one there, plain SGD with rate 0.05
    held_out        fraction of a device's records that it is evaluated on and never trains on
    statistics      what happens to batch norm's running statistics: "averaged" (by records), "local" (every device keeps its own) or
                    "frozen" (normalisation uses the model's initial statistics). "": averaged, or frozen with an epsilon
    clip, schedule  largest global norm of a step's gradients, and a rate schedule over the steps of one round, which
                    starts anew in every round; by default those of the Job
    """

    epochs: int = 1
    batch: int = 10
    lr: float | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    steps: int = 0
    held_out: float = 0.0
    statistics: str = ""
    clip: float = 0.0
    schedule: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 0), ("steps", 0), ("held_out", 0), ("clip", 0)):
            if not getattr(self, name) >= least:
                raise Mistake(f"{name}={getattr(self, name)} in Local: give {least} or more")
        if self.lr is not None and self.optimizer is not None:
            raise Mistake(
                f"lr={self.lr} and an optimizer in Local: an optimizer has a rate of its own; give one of them"
            )
        if not self.rate > 0:
            raise Mistake(f"lr={self.lr} in Local: give a rate above 0")
        if self.held_out >= 1:
            raise Mistake(f"held_out={self.held_out} in Local: it is a share of a device's records, give less than 1")
        if self.statistics not in ("", *StatisticsRule):
            raise Mistake(f"statistics={self.statistics!r} in Local: there are {', '.join(StatisticsRule)}")

    @property
    def rate(self) -> float:
        """The rate of plain SGD."""
        return RATE if self.lr is None else self.lr


class Partition(Protocol):
    """A rule that divides a data set among devices; see `data/partition.py`. Its result is determined by the seed."""

    def clients(
        self, data: Any, count: int, seed: int
    ) -> Mapping[str, Any]: ...  # name -> its records, made when they are needed
