"""Gates on a model's weights: which weights get one, where they are, and the model without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoestring.compression.sparse.gate import Gate
from shoestring.core.errors import Mistake

EMBEDDINGS = (
    nn.Embedding,
    nn.EmbeddingBag,
)  # their rows are looked up: sparse only where a layer that multiplies has the same weight
NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class GatedWeight:
    """A weight of a layer."""

    layer: nn.Module
    attribute: str


@dataclass(frozen=True)
class Gated:
    """A weight with its gate."""

    weight: Tensor
    gate: Gate
    places: tuple[GatedWeight, ...]  # several where it is tied


def chosen(model: nn.Module, skip: tuple[str, ...]) -> dict[str, tuple[GatedWeight, ...]]:
    """The weights that become sparse, by their names: all trained ones with two or more dimensions of layers that multiply."""
    found: dict[int, tuple[str, list[GatedWeight]]] = {}
    multiplied = set[int]()
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer) and not skipped(name, skip):
            raise Mistake(
                f"the layer {name or type(layer).__name__} is parametrized already (weight_norm, spectral_norm or such), and a "
                f"gate needs the weight itself: remove that, or leave the layer out with skip={name!r}"
            )
        for attribute, weight in layer.named_parameters(recurse=False):
            if "weight" not in attribute or weight.dim() < 2 or isinstance(layer, NORMS) or not weight.requires_grad:
                continue
            whole = f"{name}.{attribute}" if name else attribute
            found.setdefault(id(weight), (whole, []))[1].append(GatedWeight(layer, attribute))
            if not isinstance(layer, EMBEDDINGS):
                multiplied.add(id(weight))
    kept = {
        name: tuple(places) for key, (name, places) in found.items() if key in multiplied and not skipped(name, skip)
    }
    if not kept:
        raise Mistake(
            f"the model {type(model).__name__} has no weight to make sparse (of layers that multiply: linear, convolutions, "
            f"recurrent, attention), with skip={','.join(skip)!r}"
        )
    return kept


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether a name, or one that it lies in, matches a pattern.

    >>> skipped("head.0.weight", ("head",)), skipped("body.weight", ("head", "*.bias"))
    (True, False)
    """
    stems = [".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 2)]
    return any(fnmatchcase(stem, pattern) for stem in stems for pattern in skip)


def attach(
    model: nn.Module, made: Callable[[str, Tensor, tuple[GatedWeight, ...]], Gate], skip: tuple[str, ...]
) -> None:
    """Put gates on the model's weights; tied weights share one."""
    found = chosen(model, skip)
    orders = {
        id(place.layer): tuple(name for name, _ in place.layer.named_parameters(recurse=False, remove_duplicate=False))
        for places in found.values()
        for place in places
    }
    for name, places in found.items():
        weight = getattr(places[0].layer, places[0].attribute)
        if weight.is_meta:
            raise Mistake(
                f"the model is made on the meta device, where {name} has no values: make it as usual to train it sparsely"
            )
        gate = made(name, weight.detach(), places)
        gate.orders = tuple(orders[id(place.layer)] for place in places)
        for place in places:
            # unsafe: torch would call the gate to try it, and forward is not for trying
            parametrize.register_parametrization(place.layer, place.attribute, gate, unsafe=True)


def gated(model: nn.Module) -> dict[str, Gated]:
    """The weights with gates, by the names that they have without."""
    found: dict[int, tuple[str, Tensor, Gate, list[GatedWeight]]] = {}
    for name, layer, attribute, listed in parametrized(model):
        gate = listed[0]
        if isinstance(gate, Gate):
            whole = f"{name}.{attribute}" if name else attribute
            found.setdefault(id(gate), (whole, listed.original, gate, []))[3].append(GatedWeight(layer, attribute))
    if not found:
        raise Mistake(f"the model {type(model).__name__} has no gates: make one with sparse_job(job).model()")
    return {name: Gated(weight, gate, tuple(places)) for name, weight, gate, places in found.values()}


def parametrized(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, parametrize.ParametrizationList]]:
    for name, layer in model.named_modules():
        if parametrize.is_parametrized(layer):
            lists = layer.parametrizations
            assert isinstance(lists, nn.ModuleDict), "torch keeps them so"
            for attribute, listed in lists.items():
                assert isinstance(listed, parametrize.ParametrizationList), "torch keeps them so"
                yield name, layer, attribute, listed


@torch.no_grad()
def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """True where a weight is kept, by the weights' names, of the model of a sparse job."""
    return {name: one.gate.kept(one.weight).clone() for name, one in gated(model).items()}


def sparsity(masks: Mapping[str, Tensor]) -> float:
    """The share of zeros in all masks."""
    return 1 - sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


@torch.no_grad()
def without_gates(model: nn.Module) -> nn.Module:
    """A copy of the model with ordinary weights, in which what the gates closed is zero."""
    for layer in model.modules():
        if isinstance(
            layer, nn.RNNBase
        ):  # it keeps what it multiplied with last, which can't be copied while it has a gradient: it looks
            layer.to(layer.all_weights[0][0].device)  # for its weights again, and now there is none
    made = copy.deepcopy(model).eval()
    there = gated(made)
    dense = {name: getattr(one.places[0].layer, one.places[0].attribute).clone() for name, one in there.items()}
    orders = {
        id(place.layer): (place.layer, order)
        for one in there.values()
        for place, order in zip(one.places, one.gate.orders, strict=True)
    }
    originals = [(place, one.weight) for one in there.values() for place in one.places]
    for name, one in there.items():
        one.gate.leave()
        one.weight.copy_(dense[name])
    for layer, _ in orders.values():
        # Not by torch's function: it takes the property away from a class that the copy shares with the model
        layer.__class__ = parametrize.type_before_parametrizations(layer)
        del layer.parametrizations
    for place, weight in originals:
        assert isinstance(weight, nn.Parameter), "only trained weights have gates"
        place.layer.register_parameter(place.attribute, weight)
    for layer, order in orders.values():
        in_order(layer, order)
    return made.train(model.training)


def in_order(layer: nn.Module, names: tuple[str, ...]) -> None:
    """Have a layer's own parameters in this order, which is that of its state and of an optimizer's."""
    found = {name: getattr(layer, name) for name in names}
    for name in names:
        delattr(layer, name)
    for name, parameter in found.items():
        layer.register_parameter(name, parameter)
    if isinstance(layer, nn.RNNBase):
        layer.to(next(iter(found.values())).device)  # it looks for its weights again
