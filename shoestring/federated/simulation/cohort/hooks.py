"""Looks for hooks, replaced forwards and parameter subclasses, which fast simulation methods would silently ignore.

The stacked method trains other tensors than the model's parameters, and the fused method calls no module, so neither
would call a hook. A trial run might not notice: a hook that clips, for example, rarely changes anything.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoestring.core.private import has_backward_hooks, has_forward_hooks, has_gradient_hooks

REGISTERS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


def stacking_obstacle(model: nn.Module) -> str:
    """Why the stacked method would train this model differently; empty if nothing is found."""
    for name, one in model.named_parameters():
        if has_gradient_hooks(one):
            return f"the weight {name} has a hook on its gradient, which stacked weights would not call"
        if type(one) is not nn.Parameter:
            return f"the weight {name} is a {type(one).__name__}, and stacked ones would be plain tensors"
    found = next((name for name, module in model.named_modules() if has_backward_hooks(module)), None)
    return (
        ""
        if found is None
        else f"the module {found or 'itself'} has a backward hook, which would be called once for all devices"
    )


def bypass_obstacle(model: nn.Module) -> str:
    """Why a method that does not call the model's modules would compute something else; empty if nothing is found."""
    for name, module in model.named_modules():
        if has_forward_hooks(module):
            return f"the module {name or 'itself'} has a forward hook"
        if "forward" in vars(module):
            return f"the module {name or 'itself'} has its own forward set on the object"
    return stacking_obstacle(model)


class HooksSeen(TorchFunctionMode):
    """Inside this mode, `some` becomes True if a forward registers a hook on a tensor. vmap would drop such hooks
    silently."""

    some = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.some = self.some or function in REGISTERS
        return function(*args, **(kwargs or {}))
