"""Whether an optimizer can step with the state that a checkpoint gave it: a file whose seal is right may say anything.

What a step needs is found by trying: the same optimizer steps small stand-ins by the settings that were loaded, and what it
keeps of them is compared with what was loaded. Only for optimizers whose code was read: what others keep may depend on the
sizes of weights, and is not looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn, optim

from shoestring.core.errors import error_sentence
from shoestring.core.optimization.stepping_trial import BY_WEIGHT, ELEMENTWISE
from shoestring.core.private import without_modes
from shoestring.training.optimizers import Lamb, Lars

READ = (*ELEMENTWISE, *BY_WEIGHT, Lamb, Lars)
SIDE = 2  # largest size of a stand-in's dimensions


def lack_of(optimizer: optim.Optimizer, names: Mapping[int, str]) -> str:
    """What a restored optimizer can't step with, in words; empty if it can. `names`: of weights, by id.

    >>> optimizer = optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    >>> optimizer.state[optimizer.param_groups[0]["params"][0]] = {"other": 1}
    >>> lack_of(optimizer, {})
    "no 'momentum_buffer' for a weight of 3"
    """
    for group in optimizer.param_groups if type(optimizer) in READ else ():
        for weight in group["params"]:
            if weight.requires_grad and (told := lack_of_weight(optimizer, group, weight)):
                return f"{told} for {repr(names[id(weight)]) if id(weight) in names else weight_text(weight)}"
    return ""


def weight_text(weight: Tensor) -> str:
    return f"a weight of {' x '.join(map(str, weight.shape)) or 'one number'}"


def lack_of_weight(optimizer: optim.Optimizer, group: dict[str, Any], weight: Tensor) -> str:
    """The same of one weight; one without any state begins anew, like one that never had a gradient."""
    found = optimizer.state.get(weight, {})
    if not isinstance(found, dict):
        return f"a {type(found).__name__} instead of an optimizer's state"
    stand_in = torch.zeros([min(size, SIDE) for size in weight.shape], dtype=weight.dtype, device=weight.device)
    try:
        needed = first_step_state(optimizer, group, nn.Parameter(stand_in))
    except Exception as error:  # of the settings: they were loaded too
        return f"settings that {type(optimizer).__name__} can't step with ({error_sentence(error)})"
    for name, value in needed.items() if found else ():
        if name not in found:
            return f"no {name!r}"
        if not alike(found[name], value, weight.shape, stand_in.shape):
            return f"no {name!r} of the right kind and shape"
    return ""


def first_step_state(optimizer: optim.Optimizer, group: dict[str, Any], weight: nn.Parameter) -> Mapping[str, Any]:
    """What such an optimizer keeps of a weight after its first step."""
    twin = copy(optimizer)  # as pickle does: without hooks, and without what a technique put on this one
    twin.state, twin.param_groups = defaultdict(dict), [group | {"params": [weight]}]
    weight.grad = torch.zeros_like(weight)
    if isinstance(optimizer, optim.SparseAdam):
        weight.grad = weight.grad.to_sparse()
    with without_modes():
        twin.step()
    return dict(twin.state[weight])


def alike(found: object, needed: object, shape: torch.Size, stand_in: torch.Size) -> bool:
    """Whether a loaded number or tensor is of the kind and shape that the stand-in's says it must have."""
    if not isinstance(needed, Tensor):
        return needed is None or isinstance(found, (int, float))
    if not isinstance(found, Tensor) or found.layout is not needed.layout:
        return False
    return found.shape == shape if needed.shape == stand_in else found.dim() == needed.dim()
