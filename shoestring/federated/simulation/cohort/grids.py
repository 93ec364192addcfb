"""Convolutional models of many devices in one forward: grouped convolutions on channels that lie last.

The channels of k devices stand side by side, (batch, k x channels, height, width), a group each. In memory channels come last, so that
pooling and activations go through numbers that lie together: pooling alone was a third of the plain loop's time, and convolutions with
groups are a quarter faster than one after the other (measured on an EPYC, 8 devices, 5x5, 16 and 32 channels).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.batch import Batch
from shoestring.core.job import Job, default_forward
from shoestring.federated.simulation.cohort.dense import passes
from shoestring.federated.simulation.cohort.recorded import Weights
from shoestring.federated.simulation.cohort.stacked import Outputs
from shoestring.federated.simulation.cohort.way import Unsuitable

EACH = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Hardtanh, nn.ReLU6)  # of every number
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)  # of every channel


def grid_outputs(job: Job, model: nn.Module) -> Outputs:
    """The stacked forward of a Sequential of convolutions, pools, activations and linear layers; anything else is refused."""
    if job.forward is not default_forward:
        raise Unsuitable("the job has a forward of its own")
    modules = pooled_first(list(flattened("", model)))
    if not any(isinstance(module, nn.Conv2d) for _, module in modules):
        raise Unsuitable("it has no convolution")

    def called(weights: Weights, batch: Batch) -> Tensor:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch  # (k, batch, channels, height, width)
        if not isinstance(x, Tensor) or x.dim() != 5:
            raise Unsuitable("its inputs are not images")
        return outputs(modules, weights, x)

    return called


def pooled_first(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """ReLU after max-pooling in the place of before: the same numbers and gradients, of a quarter as many.

    max(relu(x)) = relu(max(x)),  and where that is 0 no gradient comes through either
    """
    found = list(modules)
    for place in range(len(found) - 1):
        if isinstance(found[place][1], nn.ReLU) and isinstance(found[place + 1][1], nn.MaxPool2d):
            found[place], found[place + 1] = found[place + 1], found[place]
    return found


def outputs(modules: list[tuple[str, nn.Module]], weights: Weights, x: Tensor) -> Tensor:
    """(k, batch, classes). A bias is added behind the pool that follows its convolution: max(x) + b = max(x + b), of a quarter as many."""
    count, grid, late = len(x), True, None
    x = side_by_side(x)
    for (name, module), (_, following) in zip(modules, [*modules[1:], ("", None)], strict=True):
        if isinstance(module, nn.Conv2d):
            bias = None if module.bias is None else weights[f"{name}bias"].flatten()
            late = bias if isinstance(following, nn.MaxPool2d) else None
            x = F.conv2d(
                x,
                weights[f"{name}weight"].flatten(0, 1),
                None if late is not None else bias,
                module.stride,
                module.padding,
                module.dilation,
                count,
            )
        elif isinstance(module, nn.MaxPool2d) and late is not None:
            x, late = module(x) + late.view(-1, 1, 1), None
        elif isinstance(module, nn.Linear):
            weight = weights[f"{name}weight"].mT
            x = (
                torch.bmm(x, weight)
                if module.bias is None
                else torch.baddbmm(weights[f"{name}bias"].unsqueeze(1), x, weight)
            )
        elif isinstance(module, nn.Flatten):
            x, grid = (one_by_one(x, count) if grid else x), False
        else:
            x = module(x)  # of every number or channel by itself, whoever's it is
    return x


def side_by_side(x: Tensor) -> Tensor:
    """(k, batch, channels, ...) as (batch, k x channels, ...), channels last in memory."""
    k, batch, channels, height, width = x.shape
    # Not by permuting alone: where that gives a view, its memory is not as convolutions and pools want it
    return x.transpose(0, 1).reshape(batch, k * channels, height, width).contiguous(memory_format=torch.channels_last)


def one_by_one(x: Tensor, count: int) -> Tensor:
    """The reverse, with all of a sample in a row: (k, batch, channels x height x width)."""
    rows: Tensor = x.unflatten(1, (count, -1)).transpose(0, 1).flatten(2)
    return rows


def flattened(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested Sequentials with the prefix of their weights' names."""
    if type(model) is nn.Sequential:
        for place, child in model.named_children():
            yield from flattened(f"{name}{place}.", child)
    elif type(model) is nn.Conv2d:
        if model.groups != 1 or model.padding_mode != "zeros":
            raise Unsuitable("a convolution with groups or padded otherwise than by zeros")
        yield name, model
    elif type(model) in (nn.Linear, *EACH, *POOLS) or passes(model):
        yield name, model
    else:
        raise Unsuitable(f"it has a {type(model).__name__}")
