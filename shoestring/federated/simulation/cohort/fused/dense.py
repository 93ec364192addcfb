"""Recognises the models that the fused method can train: a Sequential of linear layers with elementwise activations
between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.federated.model.layout import Layout
from shoestring.federated.simulation.cohort.method import Unsuitable


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its backward, both writing to `out`."""

    forward: Callable[[Tensor, Tensor], Any]  # (z, out)
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # (gradient of the result, z, result, out)


aten = torch.ops.aten
RELU = Activation(
    lambda z, out: torch.clamp(z, min=0, out=out),
    lambda gradient, z, result, out: aten.threshold_backward.grad_input(gradient, result, 0, grad_input=out),
)
TANH = Activation(
    lambda z, out: torch.tanh(z, out=out),
    lambda gradient, z, result, out: aten.tanh_backward.grad_input(gradient, result, grad_input=out),
)
SIGMOID = Activation(
    lambda z, out: torch.sigmoid(z, out=out),
    lambda gradient, z, result, out: aten.sigmoid_backward.grad_input(gradient, result, grad_input=out),
)


def gelu(approximate: str) -> Activation:
    return Activation(
        lambda z, out: aten.gelu.out(z, approximate=approximate, out=out),
        lambda gradient, z, result, out: aten.gelu_backward.grad_input(
            gradient, z, approximate=approximate, grad_input=out
        ),
    )


@dataclass(frozen=True)
class Dense:
    """A linear layer and the activation behind it."""

    weight: str  # name in the layout
    bias: str | None
    width: int  # output features
    inputs: int  # input features
    activation: Activation | None  # None: the last layer


def dense_layers(model: nn.Module, layout: Layout) -> tuple[Dense, ...]:
    """The model as linear layers; Unsuitable if it is anything else."""
    names = {id(one): name for name, one in model.named_parameters()}
    rows = {entry.name for entry in layout.entries if entry.trained}
    layers: list[Dense] = []
    pending: nn.Linear | None = None

    def dense_layer(linear: nn.Linear, activation: Activation | None) -> Dense:
        found = Dense(
            names[id(linear.weight)],
            None if linear.bias is None else names[id(linear.bias)],
            linear.out_features,
            linear.in_features,
            activation,
        )
        if not {found.weight, found.bias} - {None} <= rows:
            raise Unsuitable("some of its weights are frozen")
        return found

    for module in dense_modules(model):
        if isinstance(module, nn.Linear):
            if pending is not None:
                raise Unsuitable("two linear layers with nothing between them")
            pending = module
        elif (activation := activation_of(module)) is not None:
            if pending is None:
                raise Unsuitable(f"a {type(module).__name__} without a linear layer before it")
            layers.append(dense_layer(pending, activation))
            pending = None
        elif type(module) is nn.Flatten and layers + [pending] != [None]:
            raise Unsuitable("a Flatten behind a linear layer")
    if pending is None:
        raise Unsuitable("its last layer is not linear")
    layers.append(dense_layer(pending, None))
    used = [layer.weight for layer in layers] + [layer.bias for layer in layers if layer.bias]
    if len(set(used)) != len(used) or set(used) != rows or len(layout.entries) != len(rows):
        raise Unsuitable("layers share weights, or have some that no layer uses")
    return tuple(layers)


def dense_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of nested Sequentials in order."""
    if type(model) is nn.Sequential:
        for child in model:
            yield from dense_modules(child)
    elif type(model) is nn.Linear or activation_of(model) is not None or keeps_numbers(model):
        yield model
    else:
        raise Unsuitable(f"it has a {type(model).__name__}")


def keeps_numbers(module: nn.Module) -> bool:
    """Whether a module changes no numbers, at most the shape (to one row per sample)."""
    return (
        type(module) is nn.Identity
        or (type(module) is nn.Dropout and module.p == 0)
        or (type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1))
    )


def activation_of(module: nn.Module) -> Activation | None:
    if type(module) is nn.GELU:
        return gelu(module.approximate)
    return {nn.ReLU: RELU, nn.Tanh: TANH, nn.Sigmoid: SIGMOID}.get(type(module))
