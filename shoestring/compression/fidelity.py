"""Fidelity: how close what a smaller model says is to what the original says. No labels are needed.

    cosine    1 - |a/|a| - b/|b||^2 / 2, of every vector of the outputs (their last dimension)
    kl        exp(-KL(softmax a || softmax b)), of every vector of the outputs: for models that give logits

Both are 1 for the same outputs, and what is missing to 1 is the damage: 1 - cos, or KL, which is the same to first order. Damages of
single weights add up, because errors of different weights are hardly correlated and outputs are nearly linear in small ones
(decisions/021 has figures).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake

MEASURES = ("cosine", "kl")
Forward = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True)
class Fidelity:
    mean: float
    worst: float
    count: int        # vectors that were compared

    @property
    def damage(self) -> float:
        return 1 - self.mean


def main_output(output: Any) -> Tensor:
    """The tensor that is compared: of several, `logits` if it is there, else the first floating-point one that has a dimension."""
    found = dict(named_tensors("", output))
    for name, one in found.items():
        if name.rpartition(".")[2] == "logits":
            return one
    for one in found.values():
        return one
    raise Mistake(f"the model's output ({type(output).__name__}) has no floating-point tensor to compare: give the Job a "
                  f"forward=lambda model, batch: ... that returns one")


def named_tensors(name: str, output: Any) -> Iterable[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.dim():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(f"{name}.{key}", value)
    elif isinstance(output, (tuple, list)):
        for number, value in enumerate(output):
            yield from named_tensors(f"{name}.{number}", value)


def vectors(output: Any) -> Tensor:
    """What is compared as rows of vectors. Outputs that are single numbers are one vector a batch."""
    tensor = main_output(output).detach()
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] > 1 and tensor.dim() > 1 else tensor.reshape(1, -1)


def outputs(model: nn.Module, forward: Forward, batches: Iterable[Batch]) -> list[Tensor]:
    with torch.no_grad():
        return [vectors(forward(model, batch)) for batch in batches]


def damages(found: Tensor, wanted: Tensor, measure: str) -> Tensor:
    """What is missing to fidelity 1, of every vector; in double precision, because small ones are differences of nearly equal numbers.

    >>> damages(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), "cosine")
    tensor([0.2929], dtype=torch.float64)
    """
    if found.shape != wanted.shape:
        raise Mistake(f"the outputs have another shape, {list(found.shape)}, than the original's, {list(wanted.shape)}: a model whose "
                      f"outputs depend on what it computed before, or on chance, can't be compared")
    a, b = found.double(), wanted.double()
    if measure == "kl":
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        return -torch.expm1(-(log_b.exp() * (log_b - log_a)).sum(-1).clamp(min=0))
    lengths = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    gap = a / lengths[0].clamp(min=1e-300) - b / lengths[1].clamp(min=1e-300)
    return torch.where(both_zero[:, 0], 0.0, gap.square().sum(-1) / 2)


def finite(said: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in said)


def fidelity(found: Sequence[Tensor], wanted: Sequence[Tensor], measure: str = "cosine") -> Fidelity:
    """Vectors with numbers that are not finite have fidelity 0; where the original's are not, nothing can be said."""
    if not finite(wanted):
        raise Mistake("the original's outputs have numbers that are not finite: there is nothing to compare with")
    lost = torch.cat([damages(one, other, measure) for one, other in zip(found, wanted, strict=True)])
    lost = torch.where(torch.isfinite(lost), lost, 1.0)
    return Fidelity(1 - float(lost.mean()), 1 - float(lost.max()), len(lost))
