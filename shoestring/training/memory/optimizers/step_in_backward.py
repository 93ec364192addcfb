"""StepInBackward: update each parameter in the backward pass, as soon as its gradient is there, and free the gradient.

    gradients  sum_i g_i  ->  max_i g_i          no full set of gradients ever exists

Bit-equal where the optimizer updates every weight independently (core/optimization/stepping.py tries that). It can't be combined
with what needs all gradients first: clipping by their global norm, gradient accumulation, loss scaling. A backward that
reads a weight after its update is refused; the first one is watched for that.
Lv et al.: Full Parameter Fine-tuning for Large Language Models with Limited Resources (LOMO), 2023, arXiv 2306.09782.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.optimization.stepping import StepDivision, only
from shoestring.core.private import writes_unseen
from shoestring.core.running.run import Run
from shoestring.measure.interception import MemoryRanges, UpdatedGuard
from shoestring.training.technique import TrainingTechnique

CLIPS = "the job clips gradients by their global norm, which is known only when all of them are there"


@dataclass(frozen=True)
class StepInBackward(TrainingTechnique):
    """Update each weight in backward, as soon as its gradient is complete.

    Costs: no numbers and next to no time.

    Not for: jobs that clip by the global norm or accumulate, which need all gradients first.
    """

    order: ClassVar[int] = 50
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    divides: ClassVar[StepDivision] = StepDivision.IN_TURNS
    why: ClassVar[str] = "no full set of gradients ever exists"

    @classmethod
    def probes(cls, run: Run) -> dict[str, AbstractContextManager[Callable[[], object]]]:
        smallest = min((p for p in run.model.parameters() if p.grad is not None), key=lambda p: p.numel(), default=None)
        return {} if smallest is None else {"call": lone_step(run, smallest)}  # mostly call overhead

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has(Trait.CLIPS):
            return CLIPS
        return super().refusal(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        update, whole = ledger.update, ledger.block_gradients or 1.0
        blocks = tuple(
            block.with_changes(
                gradient=0.0,
                spike=max(block.spike, 0.0) + update.rise * bool(block.gradient),
                backward=block.backward + (update.seconds + update.call_seconds) * block.gradient / whole,
            )
            for block in ledger.blocks
        )
        return replace(ledger, blocks=blocks, update=replace(update, seconds=0.0, rise=0.0))

    def apply(self, run: Run) -> Run:
        if run.settings.clip:  # also checked here: a plan file may have been edited by hand
            raise Mistake(f"StepInBackward: {CLIPS}")
        group_of = {parameter: group for group in run.optimizer.param_groups for parameter in group["params"]}

        names: dict[Tensor, str] = {parameter: name for name, parameter in run.model.named_parameters()}
        updated, checked = MemoryRanges(), False

        def step(parameter: Tensor) -> None:
            # autograd refuses late reads of detach() too, and blames the model's code; in the first backward we do
            unseen = nullcontext() if checked else writes_unseen((parameter,))
            with torch.no_grad(), only(run.optimizer, parameter, group_of[parameter]), unseen:
                run.optimizer.step()
            parameter.grad = None
            if not checked:
                updated.add(parameter, names.get(parameter, "?"))

        def gradients(now: Run, batch: Batch) -> Tensor:
            def backward(part: Run, value: Tensor) -> None:
                nonlocal checked
                with nullcontext() if checked else UpdatedGuard(updated, "StepInBackward"):
                    now.backward(part, value)
                checked = True
                updated.clear()

            hooks = [
                parameter.register_post_accumulate_grad_hook(step) for parameter in group_of if parameter.requires_grad
            ]
            try:
                return run.gradients(replace(now, backward=backward), batch)
            finally:
                for hook in hooks:
                    hook.remove()

        return replace(run, gradients=gradients, update=lambda now: None)


@contextmanager
def lone_step(run: Run, parameter: Tensor) -> Iterator[Callable[[], object]]:
    """While inside, a function that steps one weight alone."""
    group = next(group for group in run.optimizer.param_groups if any(p is parameter for p in group["params"]))
    with only(run.optimizer, parameter, group):
        yield run.optimizer.step
