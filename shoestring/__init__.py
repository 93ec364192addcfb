"""shoestring: deep learning on a budget. Your PyTorch model and your budget; the plan that meets it, and the proof."""
from __future__ import annotations

TYPE_CHECKING = False   # importing typing would cost more than all the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from shoestring.api import Step, fit, plan, train, verify
    from shoestring.core.errors import Mistake, OverBudget
    from shoestring.core.job import Job
    from shoestring.core.weights import Weights
    from shoestring.optimizers import Lamb, Lars
    from shoestring.planning.plan import Plan

__version__ = "0.1.0"
__all__ = ["Job", "Lamb", "Lars", "Mistake", "OverBudget", "Plan", "Step", "Weights", "fit", "plan", "train", "verify"]

HOMES = {"Job": "core.job", "Lamb": "optimizers", "Lars": "optimizers", "Mistake": "core.errors", "OverBudget": "core.errors",
         "Plan": "planning.plan", "Step": "api", "Weights": "core.weights", "fit": "api", "plan": "api", "train": "api", "verify": "api"}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import shoestring` alone does not import torch."""
    if name not in HOMES:
        raise AttributeError(f"shoestring has no {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"shoestring.{HOMES[name]}"), name)
