"""Fake results have the sizes and the orders of the real ones, in every order of the input: later copies depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.core.private import has_gradient_hooks, tree_leaves
from shoestring.measure.fake import Stage
from shoestring.measure.tracker import StorageEvent, Tracker

Call = Callable[[Tensor], Tensor]


def other(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5, memory_format=torch.contiguous_format)


def norm(kind: type[nn.Module], training: bool = True) -> Call:
    return lambda x: kind(x.shape[1]).train(training)(x)  # type: ignore[no-any-return]


ANY: dict[str, Call] = {
    "mse": lambda x: functional.mse_loss(x, other(x)),
    "mse sum": lambda x: functional.mse_loss(x, other(x), reduction="sum"),
    "mse none": lambda x: functional.mse_loss(x, other(x), reduction="none"),
    "smooth l1": lambda x: functional.smooth_l1_loss(x, other(x)),
    "l1": lambda x: functional.l1_loss(x, other(x)),
    "huber": lambda x: functional.huber_loss(x, other(x)),
    "soft margin": lambda x: functional.soft_margin_loss(x, other(x)),
    "bce": lambda x: functional.binary_cross_entropy(x.sigmoid(), other(x)),
    "bce none": lambda x: functional.binary_cross_entropy(x.sigmoid(), other(x), reduction="none"),
    "bce logits": lambda x: functional.binary_cross_entropy_with_logits(x, other(x)),
    "kl": lambda x: functional.kl_div(x.log_softmax(-1), other(x), reduction="batchmean"),
    "cosine": lambda x: functional.cosine_similarity(x, other(x)),
    "cross entropy": lambda x: functional.cross_entropy(x, other(x)),
    "softmax": lambda x: x.softmax(-1),
    "softmax 1": lambda x: x.softmax(1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "dropout": functional.dropout,
    "elu": functional.elu,
    "relu": functional.relu,
    "leaky": functional.leaky_relu,
    "softplus": functional.softplus,
    "glu": lambda x: functional.glu(x, 1),
    "linear": lambda x: functional.linear(x, torch.ones(5, x.shape[-1]), torch.ones(5)),
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(-1),
    "max": lambda x: x.max(-1).values,
    "amax": lambda x: x.amax(1),
    "var": lambda x: x.var(1),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: functional.normalize(x, dim=1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(-1).values,
    "top": lambda x: x.topk(2, -1).values,
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x * 2]),
    "where": lambda x: torch.where(x > 0, x, other(x)),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "times": lambda x: x * other(x),
    "power": lambda x: x**2,
    "divided": lambda x: x / 3.0,
    "one number": lambda x: functional.binary_cross_entropy(x.sum((1, 2)).sum().view(1).sigmoid(), torch.ones(1)),
    "signed": lambda x: x.copysign(other(x)),
    "entropy": lambda x: torch.xlogy(x, other(x)),
    "whole parts": lambda x: (x.detach() // other(x)) * x,
    "floored": lambda x: torch.div(x, other(x), rounding_mode="floor"),
    "clamp": lambda x: x.clamp(-1, 1),
    "clone": lambda x: x.clone() * 2,
    "straight": lambda x: x.contiguous() * 2,
    "reshaped": lambda x: x.reshape(x.shape[0], -1) * 2,
    "index": lambda x: x[:, torch.tensor([1, 0])],
    "picked": lambda x: x.index_select(1, torch.tensor([1, 0])),
    "gathered": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
    "products": lambda x: x @ x.transpose(-1, -2),
    "padded": lambda x: functional.pad(x, (1, 2)),
}
THREE: dict[str, Call] = {
    "batch norm": norm(nn.BatchNorm1d),
    "batch norm, judged": norm(nn.BatchNorm1d, False),
    "instance norm": norm(nn.InstanceNorm1d),
    "conv": lambda x: functional.conv1d(x, torch.ones(5, x.shape[1], 3)),
    "pool": lambda x: functional.max_pool1d(x, 2),
    "mean pool": lambda x: functional.avg_pool1d(x, 2),
    "grow": lambda x: functional.interpolate(x, scale_factor=2),
    "mirrored": lambda x: functional.pad(x, (1, 1), "reflect"),
    "repeated": lambda x: functional.pad(x, (1, 1), "replicate"),
    "prelu": lambda x: functional.prelu(x, torch.ones(x.shape[1])),
}
FOUR: dict[str, Call] = {
    "batch norm": norm(nn.BatchNorm2d),
    "batch norm, judged": norm(nn.BatchNorm2d, False),
    "group norm": lambda x: functional.group_norm(x, 2),
    "instance norm": norm(nn.InstanceNorm2d),
    "conv": lambda x: functional.conv2d(x, torch.ones(5, x.shape[1], 3, 3)),
    "depthwise": lambda x: functional.conv2d(x, torch.ones(x.shape[1], 1, 3, 3), groups=x.shape[1]),
    "conv up": lambda x: functional.conv_transpose2d(x, torch.ones(x.shape[1], 5, 2, 2), stride=2),
    "pool": lambda x: functional.max_pool2d(x, 2),
    "mean pool": lambda x: functional.avg_pool2d(x, 2),
    "pooled": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "pooled more": lambda x: functional.adaptive_avg_pool2d(x, 2),
    "nearest": lambda x: functional.interpolate(x, scale_factor=2),
    "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"),
    "mirrored": lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"),
    "repeated": lambda x: functional.pad(x, (1, 1, 1, 1), "replicate"),
    "shuffled": lambda x: functional.pixel_shuffle(x, 2),
    "unshuffled": lambda x: functional.pixel_unshuffle(x, 2),
    "channels": lambda x: functional.channel_shuffle(x, 2),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "causal": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "response": lambda x: functional.local_response_norm(x, 3),
    "unfolded": lambda x: functional.unfold(x, 2),
}
CASES = [
    pytest.param(shape, call, id=f"{len(shape)}d {name}")
    for shape, calls in (((6, 8, 8), ANY | THREE), ((2, 4, 6, 8), ANY | FOUR))
    for name, call in calls.items()
]


def orders(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A tensor in plain order, with two axes swapped, with channels last, with a step between its numbers."""
    base = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    yield base
    yield base.transpose(1, 2).contiguous().transpose(1, 2)
    yield base.transpose(0, 1).contiguous().transpose(0, 1)
    yield base.movedim(1, -1).contiguous().movedim(-1, 1)
    yield torch.stack([base, base], -1)[..., 0]


def layout(results: Any) -> list[tuple[Any, ...]]:
    return [
        (tuple(one.shape), one.stride(), one.untyped_storage().nbytes())
        for one in tree_leaves(results)
        if isinstance(one, Tensor)
    ]


def results(call: Call, x: Tensor) -> list[Tensor]:
    """What a call gives, and its gradient."""
    x.requires_grad_()
    out = call(x)
    return [out, *torch.autograd.grad(out.mean(), x)]


@pytest.mark.parametrize(("shape", "call"), CASES)
def test_fake_results_lie_in_memory_as_real_ones(shape: tuple[int, ...], call: Call) -> None:
    for x in orders(shape):
        stage = Stage()
        fake = stage.fake.from_tensor(x.detach())
        with stage:
            found = results(call, fake)
        assert layout(found) == layout(results(call, x.detach())), f"for an input of strides {x.stride()}"


class Bilinear(nn.Bilinear):
    def __init__(self) -> None:
        super().__init__(8, 8, 5)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x * 2)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 5), (6, 8)),
    "layer norm": (lambda: nn.LayerNorm(8), (6, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 6, 8)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (2, 4, 6, 8)),
    "batch norm, judged": (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 6, 8)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(8), (6, 8)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (2, 4, 6, 8)),
    "bilinear": (Bilinear, (6, 8)),
    "conv": (lambda: nn.Conv2d(4, 5, 3), (2, 4, 6, 8)),
    "conv, one sample": (lambda: nn.Conv2d(4, 5, 3), (1, 4, 6, 8)),
    "conv 1d": (lambda: nn.Conv1d(4, 5, 3), (2, 4, 8)),
    "conv 3d": (lambda: nn.Conv3d(4, 5, 3), (2, 4, 4, 6, 8)),
    "conv up": (lambda: nn.ConvTranspose2d(4, 5, 3), (2, 4, 6, 8)),
    "conv up, one sample": (lambda: nn.ConvTranspose2d(4, 5, 3), (1, 4, 6, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 8)),
    "wide": (lambda: nn.Conv2d(4, 5, 3, dilation=2), (1, 4, 6, 8)),
}


def events_of_backward(
    layer: nn.Module, x: Tensor, wanted: tuple[bool, ...], stage: Stage | None
) -> list[StorageEvent]:
    for one, want in zip((x, *layer.parameters()), wanted, strict=True):
        one.requires_grad_(want)
    tracker = Tracker(stage)
    tracker.hold((x, *layer.parameters(), *layer.buffers()))
    with tracker:
        layer(x).mean().backward()
    return list(tracker.log.events)


@pytest.mark.parametrize("name", LAYERS)
def test_a_fake_backward_makes_the_gradients_that_a_real_one_makes(name: str) -> None:
    """A layer may be frozen in part, and a backward in halves asks for some of its gradients at a time."""
    make, shape = LAYERS[name]
    for wanted in product((True, False), repeat=1 + len(list(make().parameters()))):
        if any(wanted):
            stage = Stage()
            fake = events_of_backward(stage.copy(make()), stage.fake.from_tensor(torch.rand(shape)), wanted, stage)
            assert fake == events_of_backward(make(), torch.rand(shape), wanted, None), wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_factory_may_convert_its_model_and_keeps_hooks_and_shared_weights(dtype: torch.dtype) -> None:
    def factory() -> nn.Module:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        first.weight.register_hook(lambda slope: slope * 2)
        return nn.Sequential(first, second, nn.BatchNorm1d(4)).to(dtype)

    model = Stage().model(factory)
    assert {value.dtype for value in model.parameters()} == {dtype}
    assert model[0].weight is model[1].weight and has_gradient_hooks(model[0].weight)  # type: ignore[index]
    assert torch.utils.swap_tensors.__module__ == "torch.utils"
