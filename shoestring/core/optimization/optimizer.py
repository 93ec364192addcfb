"""The job's optimizer: made from the parameters that need a gradient, or from their names too, and checked before
training.

What is refused here would train something else than the job says: a weight in no group never moves, one in two groups
moves twice, one that is not the model's is in no checkpoint, and a schedule in a hook would start anew with every
restart.
"""

from __future__ import annotations

from collections import Counter
from inspect import Parameter

import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.private import has_schedule, step_hooks
from shoestring.core.user_code.seams import calls_user
from shoestring.core.user_code.user_functions import known_signature

WAY_OUT = (
    "give the Job schedule=lambda optimizer: torch.optim.lr_scheduler...(optimizer), which is saved in checkpoints and works with "
    "every technique"
)


@calls_user("optimizer")
def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the model's parameters that need a gradient."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise Mistake(f"the model {type(model).__name__} has no parameter that requires a gradient: nothing to train")
    given = named if takes_names(job) else [parameter for _, parameter in named]
    optimizer = job.optimizer(given)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Mistake(
            f"the job's optimizer gave a {type(optimizer).__name__}: it must give an optimizer of torch, such as "
            f"optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    check_step(optimizer)
    check_groups(optimizer, model)
    return optimizer


def takes_names(job: Job) -> bool:
    """Whether the job's optimizer takes (name, parameter) pairs: its first argument's name says so."""
    takes = known_signature(job.optimizer)
    return takes is not None and next(iter(takes.parameters), "").startswith("named")


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step does more than one update."""
    kind = type(optimizer).__name__
    takes = known_signature(optimizer.step)
    closure = takes.parameters.get("closure") if takes is not None else None
    if closure is not None and closure.default is Parameter.empty:
        raise Mistake(
            f"{kind} evaluates the loss itself, several times a step, and a step here is one forward and one backward: "
            f"use another optimizer"
        )
    if has_schedule(optimizer):
        raise Mistake(
            f"the job's optimizer comes with a learning-rate scheduler, whose state no checkpoint would have: a resumed run "
            f"would begin it anew; {WAY_OUT}"
        )
    if step_hooks(optimizer):
        raise Mistake(
            f"the job's optimizer ({kind}) has a hook on its step. What it counts or changes (a learning rate, say) would be "
            f"lost when a run is resumed, and techniques that step one weight at a time would call it for each: {WAY_OUT}"
        )


def check_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse groups that do not hold the model's weights, each exactly once."""
    members = Counter(parameter for group in optimizer.param_groups for parameter in group["params"])
    names = {parameter: name for name, parameter in reversed(list(model.named_parameters(remove_duplicate=False)))}
    twice = [names.get(parameter, "?") for parameter, count in members.items() if count > 1]
    if twice:
        raise Mistake(
            f"the job's optimizer has {some(twice)} more than once and would move it as often: give every parameter once"
        )
    strange = [parameter for parameter in members if parameter not in names]
    if strange:
        raise Mistake(
            f"the job's optimizer moves a parameter of shape {tuple(strange[0].shape)} that is not the model's: no checkpoint "
            f"would have it, and techniques would not know of it; make it a part of the model"
        )
    lost = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in members
    ]
    if lost:
        raise Mistake(
            f"{some(lost)} of the model need a gradient and are in no group of the job's optimizer: their gradients would "
            f"take memory and time and move nothing; give them to the optimizer, or freeze them in the model's factory "
            f"(parameter.requires_grad_(False)), where they cost neither"
        )


def some(names: list[str]) -> str:
    """A short list of names.

    >>> some(["a"]), some(list("abcde"))
    ("the parameter 'a'", "5 parameters ('a', 'b', 'c', ...)")
    """
    if len(names) == 1:
        return f"the parameter {names[0]!r}"
    return f"{len(names)} parameters ({', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''})"
