"""shoestring: deep learning on a budget. Your PyTorch model and your budget; the plan that meets it, and the proof.

    fit(model, loss, batches, memory="2GiB")    plan for a model, then train it in place
    Job(model=..., data=..., ...)               what is to be trained; a job file has a function `job(...) -> Job`
    plan(job, memory="600MiB")                  the best plan for a job; print it
    train(job, plan)                            train in this process, step by step
    verify(job, plan)                           plain training and the plan side by side: the same weights?
    federate(job, rounds=20, epsilon=4, ...)    train where the records lie, on simulated devices
    distill("small.py", teacher="runs/big")     train a student towards its teachers' outputs
    compress(job, "small", size="16MB", ...)    a smaller or faster model in a folder; load("small", job=...) gives it back
    serve("small", job="train.py", p99="50ms")  the best server within a target; load_test(url, "bodies.jsonl") measures it
    Local, Dirichlet, Iid, ByColumn, ...        of a federated job: what a device does, and how data are divided among devices
    Mistake, OverBudget                         what they raise: something can't work, or nothing fits

Each has a docstring with an example: help(shoestring.plan). On the command line: shoestring --help.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost more than all the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from shoestring.compression.distillation.library import distill
    from shoestring.compression.library import Smaller, compress
    from shoestring.compression.loading.load import load
    from shoestring.core.clients.clients import Numbered
    from shoestring.core.clients.local import Local
    from shoestring.core.errors import Mistake, OverBudget
    from shoestring.core.job import Job
    from shoestring.core.model.weights import Weights
    from shoestring.core.optimization.schedule import PerEpoch, warmup_cosine, warmup_linear
    from shoestring.data.partition import ByColumn, Dirichlet, Iid, QuantitySkew
    from shoestring.federated.library import Federated, federate
    from shoestring.planning.plan import Outcome, Plan
    from shoestring.serving.library import serve
    from shoestring.serving.load.library import load_test
    from shoestring.training.library import FitResult, Step, fit, plan, train, verify
    from shoestring.training.optimizers import Lamb, Lars, decay_groups

__version__ = "0.1.0"
__all__ = [
    "ByColumn",
    "Dirichlet",
    "Federated",
    "FitResult",
    "Iid",
    "Job",
    "Lamb",
    "Lars",
    "Local",
    "Mistake",
    "Numbered",
    "Outcome",
    "OverBudget",
    "PerEpoch",
    "Plan",
    "QuantitySkew",
    "Smaller",
    "Step",
    "Weights",
    "__version__",
    "compress",
    "decay_groups",
    "distill",
    "federate",
    "fit",
    "load",
    "load_test",
    "plan",
    "serve",
    "train",
    "verify",
    "warmup_cosine",
    "warmup_linear",
]

HOMES = {
    "ByColumn": "data.partition",
    "Dirichlet": "data.partition",
    "Iid": "data.partition",
    "QuantitySkew": "data.partition",
    "Federated": "federated.library",
    "federate": "federated.library",
    "Local": "core.clients.local",
    "Numbered": "core.clients.clients",
    "Job": "core.job",
    "Lamb": "training.optimizers",
    "Lars": "training.optimizers",
    "Mistake": "core.errors",
    "OverBudget": "core.errors",
    "Outcome": "planning.plan",
    "PerEpoch": "core.optimization.schedule",
    "Plan": "planning.plan",
    "Step": "training.library",
    "FitResult": "training.library",
    "Weights": "core.model.weights",
    "Smaller": "compression.library",
    "compress": "compression.library",
    "load": "compression.loading.load",
    "load_test": "serving.load.library",
    "serve": "serving.library",
    "decay_groups": "training.optimizers",
    "distill": "compression.distillation.library",
    "fit": "training.library",
    "plan": "training.library",
    "train": "training.library",
    "verify": "training.library",
    "warmup_cosine": "core.optimization.schedule",
    "warmup_linear": "core.optimization.schedule",
}


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import shoestring` alone does not import torch."""
    if name not in HOMES:
        from shoestring.core.command_line.suggest import did_you_mean

        raise AttributeError(f"shoestring has no {name!r}; it has {', '.join(__all__)}{did_you_mean(name, __all__)}")
    from importlib import import_module

    return getattr(import_module(f"shoestring.{HOMES[name]}"), name)
