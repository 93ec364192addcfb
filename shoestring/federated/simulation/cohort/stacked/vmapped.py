"""Runs any model with stacked weights by torch.func.vmap, with faster batching rules for the layers of transformers.

vmap has no rule for attention, so it loops over devices; and it decomposes linear layers and norms into more passes
through memory than they need. The functions below replace these operations while the model runs. Outside of vmap they
compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoestring.core.batch import Batch
from shoestring.core.job import Job
from shoestring.federated.simulation.cohort.stacked.recording import Weights
from shoestring.federated.simulation.cohort.stacked.stacked import Outputs


def vmapped_outputs(job: Job, model: nn.Module) -> Outputs:
    return over_devices(FunctionalModule(job, model))


def vmapped_losses(job: Job, model: nn.Module) -> Callable[[Weights, Batch], Tensor]:
    """Every device's loss (k). The loss is computed inside vmap, for models whose outputs are not only tensors (a
    cache, for example)."""
    return over_devices(FunctionalModule(job, model, with_loss=True))


def over_devices(called: FunctionalModule) -> Callable[[Weights, Batch], Any]:
    places = weight_places(called)

    def one(weights: Weights, batch: Batch) -> Any:
        inside = {place: value for name, value in weights.items() for place in places[f"model.{name}"]}
        with FasterRules():
            # torch's own `tie_weights` leaves stacked weights in a module that has several names
            return torch.func.functional_call(called, inside, (batch,), tie_weights=False)

    return torch.func.vmap(one, randomness="different")


def weight_places(model: nn.Module) -> dict[str, list[str]]:
    """Every weight's name -> all attributes that hold it, under one name of each module."""
    found: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for lead, module in model.named_modules():
        for place, one in module.named_parameters(lead, recurse=False, remove_duplicate=False):
            found.setdefault(first.setdefault(id(one), place), []).append(place)
    return found


class FunctionalModule(nn.Module):
    """The job's forward, or forward and loss, as a module, so that functional_call can replace its weights."""

    def __init__(self, job: Job, model: nn.Module, with_loss: bool = False) -> None:
        super().__init__()
        self.job, self.model, self.with_loss = job, model, with_loss

    def forward(self, batch: Batch) -> Any:
        output = self.job.forward(self.model, batch)
        return self.job.loss(output, batch) if self.with_loss else output


class VmapRule(torch.autograd.Function):
    """A function used for its vmap rule only. The rule calls differentiable operations, so `backward` is never needed."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing: the operations inside the rule have their own backwards."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("this layer was called outside of vmap, with weights that all devices share")


def devices_first(value: Tensor, dim: int | None, count: int) -> Tensor:
    """Move (or add) the device dimension to the front."""
    return value.unsqueeze(0).expand(count, *value.shape) if dim is None else value.movedim(dim, 0)


class LinearRule(VmapRule):
    """x W^T + b  for k devices in one baddbmm."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        x, weight = devices_first(x, dims[0], info.batch_size), devices_first(weight, dims[1], info.batch_size)
        bias = None if bias is None else devices_first(bias, dims[2], info.batch_size)
        out: Tensor = StackedLinear.apply(x.reshape(len(x), -1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], out.shape[-1]), 0


class StackedLinear(torch.autograd.Function):
    """(k, n, in) x (k, out, in), with a backward whose weight gradient has the weight's strides, so that autograd need
    not copy it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, weight), (gradient,), needs = ctx.saved_tensors, gradients, ctx.needs_input_grad
        return (
            torch.bmm(gradient, weight) if needs[0] else None,
            torch.bmm(gradient.mT, x) if needs[1] else None,
            gradient.sum(1) if needs[2] else None,
        )


class LayerNormRule(VmapRule):
    """norm(x) w + b  for k devices."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, int]:
        x, weight, bias = (
            devices_first(one, dim, info.batch_size) for one, dim in zip((x, weight, bias), dims[:3], strict=True)
        )
        shape = (len(x), *(1,) * (x.dim() - 2), x.shape[-1])
        return torch.addcmul(
            bias.reshape(shape), F.layer_norm(x, x.shape[-1:], None, None, eps), weight.reshape(shape)
        ), 0


class AttentionRule(VmapRule):
    """Attention has no weights, so k devices with b samples each are treated as k b samples."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)

    @staticmethod
    def vmap(
        info: Any, dims: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, int]:
        query, key, value = (
            devices_first(one, dim, info.batch_size).flatten(0, 1)
            for one, dim in zip((query, key, value), dims[:3], strict=True)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
        return out.unflatten(0, (info.batch_size, -1)), 0


class FasterRules(TorchFunctionMode):
    """Inside this mode, layers that have a rule above use it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule, given = RULES.get(function, (None, None))
        found = given(*args, **kwargs) if given is not None else None
        if rule is not None and found is not None:
            return rule.apply(*found)
        return function(*args, **kwargs)


def linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def norm_arguments(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, float] | None:
    return None if weight is None or bias is None or len(normalized_shape) != 1 else (input, weight, bias, eps)


def attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, bool, float | None] | None:
    if attn_mask is not None or dropout_p or enable_gqa or query.dim() < 3:
        return None
    return query, key, value, is_causal, scale


# function -> (its rule, a function that turns its arguments into the rule's, or None if the rule does not cover them)
RULES: dict[Any, tuple[Any, Any]] = {
    F.linear: (LinearRule, linear_arguments),
    F.layer_norm: (LayerNormRule, norm_arguments),
    F.scaled_dot_product_attention: (AttentionRule, attention_arguments),
}
