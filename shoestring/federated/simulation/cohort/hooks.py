"""What is hung on a model beside its forward: hooks, a forward of one object's own, parameters that are more than numbers.

Stacked weights are other tensors than the model's parameters, and hand-written steps call no module, so neither would call what hangs
there. A probe sees that only if it changes something at once, and a hook that clips rarely does. So it is looked for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoestring.core.private import has_backward_hooks, has_forward_hooks, has_gradient_hooks

REGISTERS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


def hooked_gradients(model: nn.Module) -> str:
    """Why stacked weights would not be trained as this model's; empty: they would, as far as one can see from outside."""
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


def replaced_forward(model: nn.Module) -> str:
    """Why steps that call no module would not do what this model does; empty: they would."""
    for name, module in model.named_modules():
        if has_forward_hooks(module):
            return f"the module {name or 'itself'} has a forward hook"
        if "forward" in vars(module):
            return f"the module {name or 'itself'} has a forward of its own"
    return hooked_gradients(model)


class HooksSeen(TorchFunctionMode):
    """While inside, hooks that a forward puts on tensors are noticed: under vmap they would be dropped without a word."""

    some = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.some = self.some or function in REGISTERS
        return function(*args, **(kwargs or {}))
