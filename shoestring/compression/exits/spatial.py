"""Spatially adaptive computation time: positions of a map leave a chain of residual units one by one.

    x^{l+1} = x^l + residual_l(x^l)    at positions that run,        x^{l+1} = x^l elsewhere
    h^l     = sigmoid( conv(x^l) + w . mean over the map of x^l + b ) at positions that run, x^l after unit l
    output  = sum_l p_l x^l            N, R, p and the ponder cost as in ponder.py, by position; N is at most the number of units

Figurnov, Collins, Zhu, Zhang, Huang, Vetrov, Salakhutdinov: Spatially Adaptive Computation Time for Residual Networks,
2017, arXiv 1612.02297. In evaluation a unit is only computed at running positions, and its earlier convolutions where
those need them, by gathering and multiplying patches. If most positions run, the whole map is computed and the rest
discarded, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoestring.compression.exits.ponder import EPSILON, Pondered, check_limits, halt
from shoestring.core.errors import Mistake
from shoestring.core.private import BATCH_NORMS

POINTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.LeakyReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
)


class AdaptiveUnits(nn.Module):
    """Residual units of one shape, each given as its residual branch. Maps (rows, channels, height, width) to a
    Pondered of maps.

    A branch is an nn.Sequential of convolutions that keep the size (stride 1, zero padding), BatchNorm2d and pointwise
    layers. gathered_below gather patches if fewer than this share of positions run; else compute the whole map
    """

    def __init__(
        self,
        branches: Sequence[nn.Sequential],
        channels: int,
        epsilon: float = EPSILON,
        bias: float = -1.0,
        gathered_below: float = 0.3,
    ) -> None:
        super().__init__()
        check_limits(len(branches), epsilon)
        for number, branch in enumerate(branches):
            check_branch(branch, number, channels)
        self.branches = nn.ModuleList(branches)
        self.scores = nn.ModuleList(nn.Conv2d(channels, 1, 3, padding=1) for _ in branches)
        self.pooled = nn.ModuleList(nn.Linear(channels, 1, bias=False) for _ in branches)
        for score in self.scores:
            assert isinstance(score, nn.Conv2d) and score.bias is not None
            nn.init.constant_(score.bias, bias)
        self.epsilon, self.gathered_below = epsilon, gathered_below

    def forward(self, x: Tensor, compact: bool | None = None) -> Pondered:
        """`compact`: compute units only at running positions; by default in evaluation."""
        compact = not self.training if compact is None else compact
        if compact and self.training:
            raise Mistake("compact=True in training: batch norms need whole maps; call .eval() first")
        running = torch.ones(len(x), *x.shape[2:], dtype=torch.bool, device=x.device)
        total, remainder, mean = x.new_zeros(running.shape), x.new_zeros(running.shape), torch.zeros_like(x)
        steps = torch.zeros_like(total, dtype=torch.long)
        for number in range(len(self.branches)):
            x, probability = self.unit(number, x, running, compact)
            found = halt(probability, total, number == len(self.branches) - 1, self.epsilon)
            mean = mean + (found.weight * running)[:, None] * x
            remainder, steps = remainder + found.remainder * running, steps + running
            total, running = torch.where(running, found.total, total), running & ~found.ends
            if not bool(running.any()):
                break
        return Pondered(mean, (steps + remainder).mean((1, 2)), steps)

    def unit(self, number: int, x: Tensor, running: Tensor, compact: bool) -> tuple[Tensor, Tensor]:
        """The maps after a unit, and halting probabilities (undefined where a position does not run)."""
        branch, score, pooled = self.branches[number], self.scores[number], self.pooled[number]
        assert isinstance(branch, nn.Sequential) and isinstance(score, nn.Conv2d)
        if not compact or float(running.float().mean()) >= self.gathered_below:
            x = x + branch(x) * running[:, None]
            return x, torch.sigmoid(score(x)[:, 0] + pooled(x.mean((2, 3)))[:, :, None])
        at = running.nonzero()
        rows, down, across = at.unbind(1)
        x = x.permute(0, 2, 3, 1).contiguous()
        x = x.index_put((rows, down, across), sparse(branch, x, running), accumulate=True)
        logits = patches(x, at, score).flatten(1) @ score.weight.permute(0, 2, 3, 1).flatten(1).T
        assert score.bias is not None
        logits = logits + score.bias + pooled(x.mean((1, 2)))[rows]
        return x.permute(0, 3, 1, 2), torch.sigmoid(
            x.new_zeros(running.shape).index_put((rows, down, across), logits[:, 0])
        )


def check_branch(branch: nn.Module, number: int, channels: int) -> None:
    """Refuse a branch whose values at some positions can't be computed from their neighbourhood."""
    layers = list(branch) if isinstance(branch, nn.Sequential) else []
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    odd = [layer for layer in layers if not (isinstance(layer, (*POINTWISE, nn.BatchNorm2d)) or keeps_size(layer))]
    if not convolutions or odd:
        found = f"a {type(branch).__name__}" if not layers else f"with {odd[0]}" if odd else "without a convolution"
        raise Mistake(
            f"branch {number} is {found}: positions leave one by one, so give an nn.Sequential of Conv2d (stride 1, ungrouped, "
            f"zero padding that keeps the size), BatchNorm2d and pointwise layers"
        )
    if convolutions[0].in_channels != channels or convolutions[-1].out_channels != channels:
        raise Mistake(
            f"branch {number} goes from {convolutions[0].in_channels} to {convolutions[-1].out_channels} channels, and is added "
            f"to maps with {channels}: make them the same"
        )
    if any(isinstance(layer, BATCH_NORMS) and not layer.track_running_stats for layer in layers):
        raise Mistake(
            f"branch {number} has a batch norm without running statistics, which needs all positions: let it keep them"
        )


def keeps_size(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and set(layer.stride) == {1}
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and (layer.padding == "same" or tuple(layer.padding) == reach(layer))
        and all(size % 2 for size in layer.kernel_size)
    )


def reach(layer: nn.Conv2d) -> tuple[int, int]:
    """How far from a position a convolution reads."""
    high, wide = ((size - 1) // 2 * far for size, far in zip(layer.kernel_size, layer.dilation, strict=True))
    return high, wide


def patches(x: Tensor, at: Tensor, layer: nn.Conv2d) -> Tensor:
    """Neighbourhoods (positions, kernel, channels) of maps (rows, height, width, channels), with zeros beyond the edge."""
    high, wide = reach(layer)
    padded = nn.functional.pad(x, (0, 0, wide, wide, high, high))
    _, height, width, channels = padded.shape
    first = (at[:, 0] * height + at[:, 1]) * width + at[:, 2]
    down, across = (
        torch.arange(size, device=x.device) * far for size, far in zip(layer.kernel_size, layer.dilation, strict=True)
    )
    around = (down[:, None] * width + across).flatten()
    found = padded.view(-1, channels).index_select(0, (first[:, None] + around).flatten())
    return found.view(len(at), -1, channels)


def sparse(branch: nn.Sequential, x: Tensor, wanted: Tensor) -> Tensor:
    """The branch at the wanted positions (rows, height, width) of channels-last maps: one row of channels per position."""
    needed: list[Tensor] = []  # where each convolution is computed, from the last to the first
    area = wanted
    convolutions = [layer for layer in branch if isinstance(layer, nn.Conv2d)]
    for convolution in reversed(convolutions):
        needed.append(area)
        high, wide = reach(convolution)
        area = nn.functional.max_pool2d(area[:, None].float(), (2 * high + 1, 2 * wide + 1), 1, (high, wide))[:, 0] > 0
    at, values = area.nonzero(), x[area]  # the input of the first convolution
    for layer in branch:
        if isinstance(layer, nn.Conv2d):
            maps = x.new_zeros(*x.shape[:3], layer.in_channels).index_put(at.unbind(1), values)
            at = needed.pop().nonzero()
            values = patches(maps, at, layer).flatten(1) @ layer.weight.permute(0, 2, 3, 1).flatten(1).T
            values = values if layer.bias is None else values + layer.bias
        elif isinstance(layer, nn.BatchNorm2d):
            values = nn.functional.batch_norm(
                values, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
            )
        elif not isinstance(layer, (nn.Dropout, nn.Dropout2d)):
            values = layer(values)
    return values
