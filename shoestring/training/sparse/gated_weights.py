"""Weights with trained gates: what a step computes with, and how the gates get their gradients.

    in a step              w' = used(w, gate, noise)                    noise drawn once per step, seeded by job, step and name
    gradient               g' = dL/dw'                                  from the plan as usual: micro-batches, checkpoints, workers
    after it               d/d(w, gate)  [ sum(used(w, gate, noise) g')  +  lambda mean penalty(w, gate) ]
    gates                  stepped by an Adam optimizer of their own

So the model, its forward and its backward know nothing of gates, and workers that sum g' have the same gates. When the
schedule ends, closed gates become a mask, the factors of open gates are multiplied into the weights, and the gates are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.model.masks import zero_masks
from shoestring.core.running.run import Run
from shoestring.training.sparse.masked_weights import MaskedWeights, masked_run
from shoestring.training.sparse.schedule import SparsitySchedule
from shoestring.training.sparse.steering import margin, steer
from shoestring.training.sparse.weights import Units

BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class GateRule:
    """A method: functions of a weight and its gate, where the gate is broadcast over the weight."""

    first: float  # initial value of every gate
    draw: Callable[[Tensor, torch.Generator], Tensor]  # noise in the shape of the gate
    used: Callable[[Tensor, Tensor, Tensor], Tensor]  # of weight, gate and noise: what a training step computes with
    penalty: Callable[[Tensor, Tensor], Tensor]  # the penalty on the loss, a sum over units
    factor: Callable[[Tensor, Tensor], Tensor]  # the factor on the weight after training
    scores: Callable[[Tensor, Tensor], Tensor]  # how far a unit is from being closed; 0 or less: closed


class GatedWeights(MaskedWeights):
    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        schedule: SparsitySchedule,
        units: Units,
        rule: GateRule,
        rate: float,
        seed: int,
    ) -> None:
        super().__init__(weights, schedule, units)
        self.rule, self.rate, self.seed = rule, rate, seed
        self.gates = {name: torch.full_like(one, rule.first, dtype=torch.float32) for name, one in self.masks.items()}
        self.first, self.second = ({name: torch.zeros_like(one) for name, one in self.gates.items()} for _ in range(2))
        self.own = {name: weight.detach().clone() for name, weight in weights.items()}  # while w' stands in its place
        self.pressure = torch.ones((), dtype=torch.float64)  # the factor on the mean penalty
        self.units_in_all = sum(gate.numel() for gate in self.gates.values())

    def noise(self, name: str) -> Tensor:
        gate = self.gates[name]
        seed = crc32(f"{self.seed} {self.step} {name}".encode())
        return self.rule.draw(gate, torch.Generator(gate.device).manual_seed(seed))

    def gradients(self, run: Run, now: Run, batch: Batch) -> Tensor:
        with torch.no_grad():
            for name, gate in self.gates.items():
                weight = self.view(name, self.own[name].copy_(self.weights[name]))
                self.view(name).copy_(self.rule.used(weight, gate, self.noise(name)))
        try:
            loss = run.gradients(now, batch)
        finally:
            with torch.no_grad():
                for name in self.gates:
                    self.weights[name].copy_(self.own[name])
        for name in self.gates:
            self.move(name)
        return loss

    def move(self, name: str) -> None:
        """From the gradient of w', compute those of the weight and of its gate, and step the gate."""
        parameter = self.weights[name]
        weight, gate = self.view(name).requires_grad_(), self.gates[name].detach().requires_grad_()
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        with torch.enable_grad():
            whole = (self.rule.used(weight, gate, self.noise(name)) * self.view(name, found)).sum()
            if self.schedule.begin < self.step + 1 < self.schedule.end:
                whole = whole + self.pressure / self.units_in_all * self.rule.penalty(weight, gate)
            of_weight, of_gate = torch.autograd.grad(whole, (weight, gate))
        with torch.no_grad():
            if parameter.grad is not None:
                self.view(name, parameter.grad).copy_(of_weight)
            self.adam(name, of_gate)

    def adam(self, name: str, gradient: Tensor) -> None:
        first, second, step = self.first[name], self.second[name], self.step + 1
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square_(), 1 - BETAS[1])
        size = second.div(1 - BETAS[1] ** step).sqrt_().add_(EPSILON)
        self.gates[name].addcdiv_(first, size, value=-self.rate / (1 - BETAS[0] ** step))

    def scores(self) -> list[Tensor]:
        return [self.rule.scores(self.view(name), gate) for name, gate in self.gates.items()]

    def new_masks(self, share: float) -> Sequence[Tensor]:
        return zero_masks(self.scores(), share, each=False) if self.gates else list(self.masks.values())

    def change(self, masks: Sequence[Tensor]) -> None:
        """Adjust the penalty; at the schedule's end, close the gates with the lowest scores and drop the gates."""
        share = self.schedule.share_at(self.step + 1)
        self.pressure = steer(self.pressure, margin(self.scores(), share).cpu(), self.schedule.updates)
        if self.step + 1 < self.schedule.end:
            return
        for name, gate in self.gates.items():
            self.view(name).mul_(self.rule.factor(self.view(name), gate))
        super().change(masks)
        self.let_gates_go()

    def let_gates_go(self) -> None:
        for one in (self.gates, self.first, self.second, self.own):
            one.clear()

    @contextmanager
    def with_final_gates(self, run: Run) -> Iterator[None]:
        """The model as it is used after training: each weight multiplied with its gate's factor."""
        with torch.no_grad():
            for name, gate in self.gates.items():
                own = self.view(name, self.own[name].copy_(self.weights[name]))
                own.mul_(self.rule.factor(own, gate))
        with run.outside.usable():
            self.swap()
            try:
                yield
            finally:
                self.swap()

    def swap(self) -> None:
        """Swap tensors without writing, because a validation checks that weights are not written to."""
        for name in self.gates:
            self.weights[name].data, self.own[name] = self.own[name], self.weights[name].data

    def state_dict(self) -> dict[str, Any]:
        gates = {"gates": self.gates, "first": self.first, "second": self.second, "pressure": self.pressure}
        return {**super().state_dict(), **gates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not state["gates"]:
            self.let_gates_go()
        self.pressure = state["pressure"].clone()
        for mine, kept in ((self.gates, "gates"), (self.first, "first"), (self.second, "second")):
            for name, value in state[kept].items():
                mine[name].copy_(value)


def gated_run(run: Run, gated: GatedWeights) -> Run:
    return replace(
        masked_run(run, gated),
        gradients=lambda now, batch: gated.gradients(run, now, batch),
        outside=replace(run.outside, usable=lambda: gated.with_final_gates(run)),
    )
