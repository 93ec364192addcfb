"""Lamb and Lars, optimizers for large batches that torch does not have; and parameter groups for weight decay, for any
optimizer.

Both take steps in proportion to a parameter's norm, so that no layer moves too far when the learning rate is large.
With a parameter x, its gradient g, the rate a, the weight decay d, and |.| the Euclidean norm over the whole parameter:

    Lamb    m <- b1 m + (1 - b1) g              v <- b2 v + (1 - b2) g^2
            u  = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + d x          after t steps
            x <- x - a |x| / |u| u

    Lars    m <- b m + a c |x| / (|g| + d |x|) (g + d x)                        c: trust coefficient
            x <- x - m

The trust ratio, |x| / |u| or c |x| / (|g| + d |x|), is 1 where one of its norms is 0. With spare_vectors, parameters of
at most one dimension (biases, scales of norms) get no weight decay and a trust ratio of 1, as biases and norms do in
the authors' code.

You et al.: Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2019, arXiv 1904.00962.
You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks, 2017, arXiv 1708.03888.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.optim.optimizer import Optimizer, ParamsT

from shoestring.core.errors import Mistake


class Layerwise(Optimizer, ABC):
    """Base of optimizers that update every parameter on its own, with `move`."""

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        for name, value in settings.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                most = 1.0 if name in ("betas", "momentum") else float("inf")
                if not 0.0 <= number < most:
                    raise Mistake(
                        f"{type(self).__name__}({name}={value}): give {'0 or more' if most > 1 else '0 or more and less than 1'}"
                    )
        super().__init__(params, settings)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise Mistake(
                        f"{type(self).__name__} was given a sparse gradient, and its trust ratio is over whole parameters: "
                        f"make the embedding with sparse=False"
                    )
                spared = group["spare_vectors"] and parameter.dim() <= 1
                self.move(parameter, parameter.grad, group, 0.0 if spared else group["weight_decay"], spared)
        return loss

    @abstractmethod
    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], decay: float, spared: bool) -> None:
        """Move a parameter against its gradient. `spared`: by the plain rule, without a trust ratio."""


class Lamb(Layerwise):
    """Adam with decoupled weight decay, every parameter's step scaled to the parameter's length."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        spare_vectors: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, spare_vectors=spare_vectors)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], decay: float, spared: bool) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        (first, second), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.div(1 - second ** state["step"]).sqrt_().add_(group["eps"])
        way = torch.div(mean, root, out=root).div_(1 - first ** state["step"]).add_(parameter, alpha=decay)
        ratio: Tensor | float = 1.0
        if not spared:
            length, slope = vector_norm(parameter), vector_norm(way)
            ratio = trust(length, slope, length / slope)
        parameter.sub_(way.mul_(ratio), alpha=group["lr"])


class Lars(Layerwise):
    """SGD with momentum, every parameter's rate scaled to its length over its gradient's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        spare_vectors: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            spare_vectors=spare_vectors,
        )

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], decay: float, spared: bool) -> None:
        state = self.state[parameter]
        if not state:
            state.update(momentum_buffer=torch.zeros_like(parameter))
        ratio: Tensor | float = 1.0
        if not spared:
            length, slope = vector_norm(parameter), vector_norm(gradient)
            ratio = trust(length, slope, group["trust_coefficient"] * length / (slope + decay * length))
        way = gradient.add(parameter, alpha=decay).mul_(ratio)
        parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(way, alpha=group["lr"]))


def trust(length: Tensor, slope: Tensor, ratio: Tensor) -> Tensor:
    """The ratio, or 1 if one of its two norms is 0."""
    return torch.where((length > 0) & (slope > 0), ratio, 1.0)


def decay_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float = 0.01, spare: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Two groups of parameters, with weight decay and without, for any optimizer of torch:

        Job(optimizer=lambda named: torch.optim.AdamW(decay_groups(named, 0.01), lr=3e-4), ...)

    Excluded from decay are biases and scales of norms: parameters of at most one dimension, or whose name ends in
    "bias" or has a part with "norm" or "ln". Embeddings are decayed like all matrices; `spare` excludes further parts
    of names, such as ("embed",).
    """
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise Mistake(
            "decay_groups was given parameters without their names: write optimizer=lambda named: ..., whose argument's name "
            "begins with 'named', to be given pairs of name and parameter"
        )
    if isinstance(spare, str):
        raise Mistake(f"decay_groups(spare={spare!r}): give several parts of names, such as ({spare!r},)")
    without = tuple(spare)
    decayed = {
        name
        for name, parameter in pairs
        if not is_spared(name, parameter) and not any(part in name for part in without)
    }
    groups = [
        {"params": [parameter for name, parameter in pairs if (name in decayed) is wanted], "weight_decay": decay}
        for wanted, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]


def is_spared(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter should get no weight decay: a bias, or the scale of a norm."""
    parts = name.lower().split(".")
    return (
        parameter.dim() <= 1
        or parts[-1].endswith("bias")
        or any("norm" in part or part.startswith("ln") for part in parts[:-1])
    )
