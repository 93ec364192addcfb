"""Weights that become zero on a schedule during training: their masks, and applying them after every update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.training.sparse.schedule import SparsitySchedule
from shoestring.training.sparse.weights import Units

# first steps in which masks are computed whatever the schedule says, so that a rehearsal sees the memory that a change
# of masks needs
LOOKS = 2
FAR = 8.0  # the lengths of all weights, relative to the distance of ten plain training steps; not exceeded by the models of the tests
STATE = "sparse"  # its name in the run's state


class MaskedWeights(RunState, ABC):
    """Base class; `new_masks` chooses the numbers to zero next. After every update they are zero, and they get no
    gradient."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], schedule: SparsitySchedule, units: Units | None = None
    ) -> None:
        self.weights, self.schedule, self.units = weights, schedule, units or Units()
        self.step = self.looks = 0
        # By name: true where a unit is zero, in a shape that broadcasts over `view(name)`
        self.masks = {
            name: torch.zeros(self.units.shape(self.view(name)), dtype=torch.bool, device=weight.device)
            for name, weight in weights.items()
        }

    @abstractmethod
    def new_masks(self, share: float) -> Sequence[Tensor]:
        """Masks of all weights for this share of zeros."""

    def view(self, name: str, tensor: Tensor | None = None) -> Tensor:
        """A weight, or a tensor of its shape, with a dimension for the units that are masked."""
        return self.units.view(name, (self.weights[name] if tensor is None else tensor).detach())

    def update(self, run: Run, now: Run) -> None:
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self.view(name, weight.grad).masked_fill_(self.masks[name], 0)
        run.update(now)
        with torch.no_grad():
            self.step += 1
            self.look()
            self.erase()

    def look(self) -> None:
        """Compute the masks of the next step, if the schedule changes them there."""
        due = self.schedule.due(self.step + 1)
        if due or self.looks < LOOKS:
            self.looks += 1
            masks = self.new_masks(self.schedule.share_at(self.step + 1))
            if due:
                self.change(masks)

    def change(self, masks: Sequence[Tensor]) -> None:
        for mask, new in zip(self.masks.values(), masks, strict=True):
            mask.copy_(new)

    def erase(self) -> None:
        for name, mask in self.masks.items():
            self.view(name).masked_fill_(mask, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "masks": self.masks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if {name: one.shape for name, one in state["masks"].items()} != {
            name: one.shape for name, one in self.masks.items()
        }:
            raise Mistake(
                f"the checkpoint has masks of {len(state['masks'])} weights, and the model has {len(self.masks)}, or others: "
                f"go on with the plan it was begun with, or give --fresh"
            )
        self.step = state["step"]
        for name, mask in state["masks"].items():
            self.masks[name].copy_(mask)

    @property
    def remark(self) -> str:
        count = sum(weight.numel() for weight in self.weights.values())
        return (
            f"{self.schedule.share:.4g} of {count:,} numbers in {len(self.weights)} weights become zero between the steps "
            f"{self.schedule.begin} and {self.schedule.end}; they stay dense in memory, and steps are no faster for them"
        )


def masked_run(run: Run, masked: MaskedWeights) -> Run:
    return replace(run, update=lambda now: masked.update(run, now), state={**run.state, STATE: masked})


def mask_cost(ledger: Ledger, copies: float = 0.0) -> Ledger:
    """A byte per weight, and `copies` copies of the weights; while masks change, about four more for scores and
    sorting."""
    weights, machine = ledger.standing.parameters, ledger.machine
    passes = 4 + 6 * copies  # over memory, in every update
    now = ledger.with_update_rise(4 * weights)
    return replace(
        now,
        standing=replace(now.standing, buffers=now.standing.buffers + (0.25 + copies) * weights),
        update=replace(
            now.update, seconds=now.update.seconds + passes * weights * machine.per_byte_moved / machine.cores
        ),
    )


def mask_drift(share: float) -> float:
    """A weight that becomes zero moves by its whole length, several times as far as ten training steps move it."""
    return FAR * sqrt(share)


def check_steps(technique: str, run: Run) -> int:
    """The number of steps of the run, which a schedule needs."""
    if not run.settings.steps:
        raise Mistake(
            f"{technique}: the job says epochs, and its data do not tell how many steps make one, so no schedule of zeros can be "
            f"made: give the Job steps=..."
        )
    return run.settings.steps
