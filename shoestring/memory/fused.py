"""Fused: one kernel updates a parameter, where torch has one (Adam, AdamW, SGD, Adagrad).

    temporaries of the update  ~ size of the largest parameter (a for-loop) or of all (foreach)  ->  0

The same formula in another order of rounding: equal to plain training within 1e-4 after ten steps.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.core.ledger import Ledger
from shoestring.core.run import Run
from shoestring.core.technique import Exactness

HAS_KERNEL = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
SPEEDUP = 4.0   # over the for-loop; only ranks plans before the optimizer was timed


@dataclass(frozen=True)
class Fused:
    order: ClassVar[int] = 45
    exact: ClassVar[bool] = True
    why: ClassVar[str] = "one kernel per parameter, no temporaries in the update"

    def refusal(self, ledger: Ledger) -> str:
        if "fused already" in ledger.traits:
            return "the job's optimizer is fused already"
        return "" if "has a fused kernel" in ledger.traits else "torch has no fused kernel for this optimizer"

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.ROUNDING

    def cost(self, ledger: Ledger) -> Ledger:
        update = ledger.update / SPEEDUP if ledger.fused_update is None else ledger.fused_update
        return replace(ledger, update=update, update_rise=0.0)

    def apply(self, run: Run) -> Run:
        if not isinstance(run.optimizer, HAS_KERNEL):
            raise Mistake(f"Fused: torch has no fused kernel for {type(run.optimizer).__name__}; leave it out")
        for group in run.optimizer.param_groups:
            group.update(fused=True, foreach=False)
        return run
