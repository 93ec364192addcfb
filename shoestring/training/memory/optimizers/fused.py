"""FusedOptimizer: update each parameter with one fused kernel, where torch has one (Adam, AdamW, SGD, Adagrad).

    temporaries of the update  ~ size of the largest parameter (a for-loop) or of all (foreach)  ->  0

The same formula, rounded in another order: within 1e-4 of plain training after ten steps, not bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.running.run import Run
from shoestring.core.user_code.seams import changes_user
from shoestring.training.technique import Owned, TrainingTechnique

HAS_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
SPEEDUP = 4.0  # over the for-loop; only ranks plans before the optimizer is timed


def can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has a fused kernel and does not use it."""
    return isinstance(optimizer, HAS_KERNEL) and not optimizer.param_groups[0].get("fused")


@dataclass(frozen=True)
class FusedOptimizer(TrainingTechnique):
    """Update every weight by one fused kernel of torch.

    Costs: nothing but the last bits of the weights.

    Not for: runs that must end with the same bits as the unfused optimizer.
    """

    order: ClassVar[int] = 45
    why: ClassVar[str] = "one kernel per parameter, no temporaries in the update"

    @classmethod
    def traits_of_run(cls, run: Run) -> frozenset[str]:
        if can_be_fused(run.optimizer):
            return frozenset({Trait.HAS_FUSED_KERNEL})
        return frozenset({Trait.FUSED_ALREADY}) if isinstance(run.optimizer, HAS_KERNEL) else frozenset()

    @classmethod
    def probes(cls, run: Run) -> dict[str, AbstractContextManager[Callable[[], object]]]:
        return {"fused": fused_update(run)} if isinstance(run.optimizer, HAS_KERNEL) else {}

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.GROUPS})

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has(Trait.FUSED_ALREADY):
            return "the job's optimizer is fused already"
        if ledger.has(Trait.COMPLEX_WEIGHTS):
            return "the model has complex weights, and torch's fused kernels are for real ones"
        if ledger.has(Trait.SPARSE_GRADIENTS):
            return "the model has sparse gradients, and torch's fused kernels are for dense ones"
        return "" if ledger.has(Trait.HAS_FUSED_KERNEL) else "torch has no fused kernel for this optimizer"

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.ROUNDING

    def cost(self, ledger: Ledger) -> Ledger:
        update = ledger.update
        seconds = update.seconds / SPEEDUP if update.fused_seconds is None else update.fused_seconds
        return replace(ledger, update=replace(update, seconds=seconds, rise=0.0))

    def apply(self, run: Run) -> Run:
        if not isinstance(run.optimizer, HAS_KERNEL):
            raise Mistake(f"FusedOptimizer: torch has no fused kernel for {type(run.optimizer).__name__}; leave it out")
        for group in run.optimizer.param_groups:
            group.update(fused=True, foreach=False)

        @changes_user
        def update(now: Run) -> None:  # a function of ours, so that a failure below it is not blamed on the job
            for group in run.optimizer.param_groups if isinstance(run.optimizer, torch.optim.SGD) else ():
                begin_late(run.optimizer, group)
            run.update(now)

        return replace(run, update=update)


@contextmanager
def fused_update(run: Run) -> Iterator[Callable[[], object]]:
    """While inside, a function that runs the run's update with the fused kernel."""
    before = [{name: group.get(name) for name in ("fused", "foreach")} for group in run.optimizer.param_groups]
    fused = FusedOptimizer().apply(run)
    try:
        yield lambda: fused.update(fused)
    finally:
        for group, knobs in zip(run.optimizer.param_groups, before, strict=True):
            group.update(knobs)


def begin_late(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Give weights whose first gradient comes in a later step (a layer that was skipped before) an initial momentum.

    The kernel takes momenta for all weights or for none. It computes m' = mu m + (1 - tau) d with dampening tau, where
    the first momentum should be d, so these begin with m = tau d / mu, which is zero without dampening.
    """
    if not group["momentum"]:
        return
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    late = [parameter for parameter in stepped if optimizer.state[parameter].get("momentum_buffer") is None]
    if len(late) == len(stepped):
        return
    for parameter in late:
        first = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if group["dampening"]:
            first.add_(parameter.grad, alpha=-1 if group["maximize"] else 1).add_(
                parameter, alpha=group["weight_decay"]
            )
            first.mul_(group["dampening"] / group["momentum"])
        optimizer.state[parameter]["momentum_buffer"] = first
