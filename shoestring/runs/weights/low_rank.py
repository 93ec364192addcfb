"""Merge low-rank updates in a checkpoint into the weights: W + scale B A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.core.running.run_state import StoredTensor


def with_update(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """W + scale B A, rounded to the weight's dtype once."""
    update = (b @ a) * scale
    return (weight.to(a.dtype) + (update.T if transposed else update)).to(weight.dtype)


def merge_updates(weights: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by name with their low-rank updates; `state` comes from `Adapters.state_dict`."""
    scale = state["alpha"] / state["rank"]
    found = dict(weights)
    for name, transposed in state["transposed"].items():
        key = f"{name}.weight".lstrip(".")
        found[key] = WithUpdate(found[key], state["A"][name], state["B"][name], scale, transposed)
    return found


class WithUpdate:
    """A weight with its low-rank update, computed when read."""

    def __init__(self, weight: Tensor | StoredTensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> None:
        self.weight, self.a, self.b, self.scale, self.transposed = weight, a, b, scale, transposed
        self.dtype, self.shape = weight.dtype, weight.shape

    def pieces(self) -> Iterator[Tensor]:
        weight = self.weight
        if not isinstance(weight, Tensor):
            weight = torch.cat([piece.reshape(-1).clone() for piece in weight.pieces()]).view(self.shape)
        with torch.no_grad():
            yield with_update(
                weight.detach(), self.a.to(weight.device), self.b.to(weight.device), self.scale, self.transposed
            ).reshape(-1)
