"""LocalSteps: every worker takes h steps on its own samples, then the workers average their weights.

    sent      2 (w - 1) / w  p / h  a step        p: bytes of the weights; a step in between sends nothing

Weights are averaged after the last step too. With `after`, the first steps average gradients (post-local SGD). With
`outer`, the workers' mean movement is the gradient of a second optimizer, SGD with Nesterov momentum (DiLoCo):

    d = x - mean_r x_r        m = momentum m + d        x = x - outer (d + momentum m)

Inexact: the workers' weights differ in between. Each worker keeps its own moments.
Stich: Local SGD Converges Fast and Communicates Little, 2018, arXiv 1805.09767; Lin et al.: Don't Use Large
Mini-Batches, Use Local SGD, 2018, arXiv 1808.07217; Douillard et al.: DiLoCo, 2023, arXiv 2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.data_parallel import (
    Statistics,
    data_parallel_refusal,
    mixed_drift,
    sum_gradients,
    trained_parameters,
    with_traffic,
)
from shoestring.training.data_parallel.local_updates import (
    flat_weights,
    load_own_state,
    own_gradients,
    own_state,
    unflatten_into,
)
from shoestring.training.data_parallel.reducer import BUCKET, make_buckets
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.technique import TrainingTechnique

LONG = 1 << 60  # more steps than any run has


@dataclass(frozen=True)
class LocalSteps(GroupTechnique):
    """Let every worker take several steps before the workers average their weights.

    Costs: some of what the model learns, the more the larger h is; every worker holds the whole model and its own
    moments.

    Not for: fast links, where averaging gradients in every step costs little.
    """

    h: int = 8  # steps between two averagings of the weights
    after: int = 0  # first steps that average gradients, before local steps begin
    outer: float = 0.0  # rate of the second optimizer (DiLoCo uses 0.7); 0: weights are averaged
    momentum: float = 0.9  # of the second optimizer

    order: ClassVar[int] = 60
    exact: ClassVar[bool] = False
    unites: ClassVar[str] = "data"
    why: ClassVar[str] = "workers communicate only every few steps, to average their weights"

    def __post_init__(self) -> None:
        if self.h < 1 or self.after < 0 or self.outer < 0 or not 0 <= self.momentum < 1:
            raise Mistake(
                f"LocalSteps(h={self.h}, after={self.after}, outer={self.outer}, momentum={self.momentum}): give one step "
                f"or more between meetings, no negative numbers, and a momentum below 1"
            )

    @property
    def agrees(self) -> float:
        return 1 / self.h

    def talking(self, steps: int) -> dict[TrainingTechnique, int]:
        """The steps in which workers communicate: those that average weights, and the first ones, which sum
        gradients."""
        alone = max(steps - self.after, 0)
        return {
            replace(self, h=1, after=0): -(-alone // self.h),
            replace(self, h=1, after=LONG): min(self.after, steps),
        }

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[LocalSteps, ...]:
        return cls(8), cls(32), cls(32, outer=0.7)

    def refusal(self, ledger: Ledger) -> str:
        return data_parallel_refusal(ledger)

    def drift(self, ledger: Ledger) -> float:
        """Averaged weights stay near those of averaged gradients; a second optimizer takes steps of its own length."""
        return (1.5 if self.outer else 0.25) + mixed_drift(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        parameters, world = ledger.standing.parameters, ledger.workers.world
        extra = parameters * (2 if self.outer else 0)
        made = replace(ledger, standing=replace(ledger.standing, buffers=ledger.standing.buffers + extra))
        return with_traffic(
            made.with_update_rise(min(BUCKET, parameters)),
            2 * (world - 1) / world * parameters / self.h,
            parameters / BUCKET / self.h + 1 / self.h,
        )

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        together = sum_gradients(run, link, lambda bucket: link.sum(bucket.buffer))
        averaging = WeightAveraging(run, link, self)
        statistics = Statistics(run.model, link)

        def gradients(now: Run, batch: Batch) -> Tensor:
            averaging.begin()
            if not averaging.apart:
                return together.gradients(now, batch)
            statistics.begin()
            return own_gradients(run, replace(now, held=replace(now.held, shared=run.held.shared)), batch)

        def update(now: Run) -> None:
            run.update(now)
            if averaging.apart and averaging.due:
                averaging.average()
                statistics.average()

        return replace(
            together,
            gradients=gradients,
            update=update,
            team=replace(together.team, synchronised=lambda: averaging.due),
            state={**run.state, "meetings": averaging},
        )


class WeightAveraging(RunState):
    """When and how the workers' weights are averaged."""

    def __init__(self, run: Run, link: Link, knobs: LocalSteps) -> None:
        self.run, self.link, self.knobs = run, link, knobs
        self.step = 0
        self.due = True  # whether all workers have the same weights after this step
        self.groups = make_buckets(trained_parameters(run))
        self.before: list[Tensor] = []  # the weights at the last averaging, for a second optimizer,
        self.moments: list[Tensor] = []  # and its momentum
        if knobs.outer:
            self.before = [flat_weights(members) for members in self.groups]
            self.moments = [torch.zeros_like(flat) for flat in self.before]

    def begin(self) -> None:
        """A step begins."""
        self.step += 1
        self.due = (
            not self.apart or (self.step - self.knobs.after) % self.knobs.h == 0 or self.step >= self.run.settings.steps
        )

    @property
    def apart(self) -> bool:
        """Whether this is a local step."""
        return self.step > self.knobs.after

    @torch.no_grad()
    def average(self) -> None:
        for number, members in enumerate(self.groups):
            flat = flat_weights(members)
            self.link.sum(flat).wait()
            flat.div_(self.link.world)
            if self.knobs.outer:
                flat = self.outer_step(number, flat)
            unflatten_into(members, flat)

    def outer_step(self, number: int, mean: Tensor) -> Tensor:
        """The second optimizer's step, from the weights at the last averaging."""
        before, moment = self.before[number], self.moments[number]
        way = before - mean
        moment.mul_(self.knobs.momentum).add_(way)
        return before.sub_(way.add_(moment, alpha=self.knobs.momentum), alpha=self.knobs.outer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "before": self.before,
            "moments": self.moments,
            "own": own_state(self.run, self.link),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for mine, saved in ((self.before, state["before"]), (self.moments, state["moments"])):
            for tensor, value in zip(mine, saved, strict=True):
                tensor.copy_(value)
        load_own_state(self.run, self.link, state["own"])
