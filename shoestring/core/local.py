"""What a device does with its own records in a federated round, and how records are divided among devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoestring.core.errors import Mistake
from shoestring.core.statistics import StatisticsRule

RATE = 0.05


@dataclass(frozen=True)
class Local:
    """The work of one device in one round: `Job(local=Local(epochs=1, batch=10, lr=0.05))`.

    epochs, steps   rounds of its own records, and the most steps (0: as many as the epochs make)
    batch           records of a step; the last batch of an epoch has what is left. 0: all of them
    lr, optimizer   plain SGD with this rate, or what `optimizer(parameters)` makes; its moments begin anew in every round. Where neither
                    is given, the Job's optimizer; without one there, plain SGD with the rate 0.05
    held_out        the share of a device's records that it is judged by and never trains on
    statistics      what becomes of a batch norm's running statistics: "averaged" (by records), "local" (every device keeps its own) or
                    "frozen" (normalisation uses the statistics that the model begins with). "": averaged, or frozen with an epsilon
    clip, schedule  largest global norm of a step's gradients, and a schedule of the rate over the steps of one round, which begins anew in
                    every round; where they are not given, those of the Job
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
        """Of plain SGD."""
        return RATE if self.lr is None else self.lr


class Partition(Protocol):
    """A rule that divides a data set among devices; `data/partition.py` has some. What it gives follows from the seed."""

    def clients(
        self, data: Any, count: int, seed: int
    ) -> Mapping[str, Any]: ...  # name -> its records, made when they are asked for
