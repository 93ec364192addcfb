"""Which weights can become sparse, and which of their numbers share a gate or mask."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoestring.core.errors import Mistake

# Embeddings: sparse only if a layer that multiplies has the same weight
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm)
OF = ("numbers", "rows", "columns", "matrices")


def weights_to_sparsify(model: nn.Module, where: str, skip: str) -> dict[str, nn.Parameter]:
    """The trained weights, by name, that have two or more dimensions, belong to layers that multiply (linear,
    convolution, recurrent, attention), and whose name, or that of a module around them, matches `where` and not `skip`.
    Tied weights appear once."""
    found: dict[nn.Parameter, str] = {}
    multiplied = set[nn.Parameter]()
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer) and matches(name, where) and not matches(name, skip):
            raise Mistake(
                f"the layer {name or type(layer).__name__} is parametrized (weight_norm, spectral_norm or such), and zeros "
                f"belong into the weight itself: remove that, or leave the layer out with skip={name!r}"
            )
        for attribute, weight in layer.named_parameters(recurse=False):
            if "weight" not in attribute or weight.dim() < 2 or isinstance(layer, NORMS) or not weight.requires_grad:
                continue
            found.setdefault(weight, f"{name}.{attribute}".lstrip("."))
            if not isinstance(layer, EMBEDDINGS):
                multiplied.add(weight)
    chosen = {
        name: weight
        for weight, name in found.items()
        if weight in multiplied and matches(name, where) and not matches(name, skip)
    }
    if not chosen:
        raise Mistake(
            f"the model {type(model).__name__} has no weight to make sparse (of layers that multiply: linear, convolutions, "
            f"recurrent, attention), with where={where!r} and skip={skip!r}"
        )
    return chosen


def matches(name: str, patterns: str) -> bool:
    """Whether a name, or that of a module around it, matches one of several patterns joined by |.

    >>> matches("head.0.weight", "head"), matches("body.weight", "head|*.bias"), matches("body.weight", "*")
    (True, False, True)
    """
    stems = [".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 2)]
    listed = [one.strip() for one in patterns.split("|") if one.strip()]
    return any(fnmatchcase(stem, pattern) for stem in stems for pattern in listed)


@dataclass(frozen=True)
class Units:
    """The units that have a gate of their own.

    numbers     each number of a weight
    rows        each row: an output of the layer, such as a filter of a convolution
    columns     `group` neighbouring columns: inputs of the layer. A neuron is a column of the layer that reads it; an attention head is as
                many columns of the output projection as the head is wide
    matrices    the whole weight
    """

    of: str = "numbers"
    group: int = 1  # number of columns per gate

    def __post_init__(self) -> None:
        if self.of not in OF:
            raise Mistake(f"of={self.of!r}: there are {', '.join(OF)}")
        if self.group < 1 or (self.group > 1 and self.of != "columns"):
            raise Mistake(
                f"group={self.group} with of={self.of!r}: so many columns belong together; give 1 or more, of columns"
            )

    def view(self, name: str, weight: Tensor) -> Tensor:
        """The weight in a shape over which one number per unit can be broadcast."""
        if self.of != "columns":
            return weight
        if weight.shape[1] % self.group:
            raise Mistake(
                f"{name} has {weight.shape[1]} columns, which are no groups of {self.group}: leave it out with where or skip"
            )
        grouped: Tensor = weight.unflatten(1, (weight.shape[1] // self.group, self.group))
        return grouped

    def shape(self, view: Tensor) -> torch.Size:
        """The shape of one number per unit."""
        ones = [1] * (view.dim() - 1)
        if self.of == "rows":
            return torch.Size([len(view), *ones])
        if self.of == "columns":
            return torch.Size([1, view.shape[1], *ones[1:]])
        return view.shape if self.of == "numbers" else torch.Size([1, *ones])
