"""EMA: an exponential moving average of the trained weights, kept beside them.

    after every update    a <- d a + (1 - d) w        d: decay; with warmup, d = min(decay, (1 + t) / (10 + t)) after t updates
    memory                + one copy of the trained weights

Validation, the best weights, the job's previews and exports use the average; the trained weights keep the same bits as
without EMA, and `export --trained` gives them. Whatever is not trained (frozen weights, buffers such as batch norm's
statistics) is the model's own.
Polyak, Juditsky: Acceleration of Stochastic Approximation by Averaging, 1992, SIAM J. Control Optim. 30(4).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import KeepsAverages, RunState
from shoestring.training.technique import TrainingTechnique


@dataclass(frozen=True)
class EMA(TrainingTechnique):
    """Keep an exponential moving average of the weights, and validate and export that.

    Costs: one more copy of the trained weights, and one pass over them a step.

    Not for: budgets in which a copy of the weights does not fit. It never saves anything, so it is used only if it
    is asked for.
    """

    decay: float = 0.999
    warmup: bool = (
        False  # begin with a smaller decay, so that the average of a short run is not mostly the initial weights
    )

    order: ClassVar[int] = 65
    exact: ClassVar[bool] = True
    why: ClassVar[str] = "a moving average of the weights is kept, validated and exported"
    on_request: ClassVar[bool] = True  # it saves nothing

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise Mistake(f"EMA(decay={self.decay}): give a number from 0 (the weights themselves) to less than 1")

    def cost(self, ledger: Ledger) -> Ledger:
        copy, machine = ledger.standing.parameters, ledger.machine
        seconds = copy * machine.per_byte_moved / machine.cores
        return replace(
            ledger,
            standing=replace(ledger.standing, buffers=ledger.standing.buffers + copy),
            update=replace(ledger.update, seconds=ledger.update.seconds + seconds),
        )

    def apply(self, run: Run) -> Run:
        average = AveragedWeights(run, self)

        def update(now: Run) -> None:
            run.update(now)
            average.follow()

        @contextmanager
        def usable() -> Iterator[None]:
            with run.outside.usable(), average.in_place():
                yield

        outside = replace(run.outside, usable=usable)
        return replace(run, update=update, outside=outside, state={**run.state, "ema": average})


class AveragedWeights(RunState, KeepsAverages):
    """The average of a run's weights."""

    def __init__(self, run: Run, knobs: EMA) -> None:
        self.knobs, self.updates = knobs, 0
        self.weights = {name: parameter for name, parameter in run.model.named_parameters() if parameter.requires_grad}
        first = {parameter: name for name, parameter in self.weights.items()}  # a shared weight has several names
        self.names = {
            name: first[parameter]
            for name, parameter in run.model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        for name, parameter in self.weights.items():
            if parameter.is_floating_point() and parameter.element_size() < 4:
                raise Mistake(
                    f"EMA: the weights {name!r} are {str(parameter.dtype).removeprefix('torch.')}, of which {knobs.decay} of one "
                    f"and the rest of another is mostly rounding: train them in 32 bits (Precision(dtype='bf16') does)"
                )
        self.averages_of = {
            name: parameter.detach().clone(memory_format=torch.preserve_format)
            for name, parameter in self.weights.items()
        }

    @torch.no_grad()
    def follow(self) -> None:
        """Update the averages after a step."""
        self.updates += 1
        decay = self.knobs.decay
        if self.knobs.warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        for name, parameter in self.weights.items():
            self.averages_of[name].lerp_(parameter, 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, the model's weights are the averages."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        for name, parameter in self.weights.items():
            parameter.data, self.averages_of[name] = self.averages_of[name], parameter.data

    @property
    def averages(self) -> dict[str, Tensor]:
        return {name: self.averages_of[first] for name, first in self.names.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "averages": self.averages_of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, value in state["averages"].items():
            self.averages_of[name].copy_(value)
