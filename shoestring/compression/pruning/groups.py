"""Find prunable units: axes that some weights produce, others read, and nothing else depends on.

heads      batch axes of products of two activations (queries with keys); with grouped-query attention, whole groups
channels   channels of convolutions, through batch norms, skip connections and groups
neurons    all others: hidden units between linear layers or of recurrent layers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from shoestring.compression.pruning.axes import UnitAxis, leaves
from shoestring.compression.pruning.trace_axes import trace_axes
from shoestring.compression.pruning.traced_forward import TracedForward

KINDS = ("heads", "neurons", "channels")


@dataclass(frozen=True)
class UnitPlace:
    """Where units lie in a weight: along a dimension of size outer x units x inner."""

    weight: str
    dim: int
    outer: int
    inner: int


@dataclass(frozen=True)
class UnitGroup:
    """Units of one kind, with all places that are pruned together."""

    name: str
    kind: str
    size: int
    places: tuple[UnitPlace, ...]
    readers: tuple[str, ...]  # weights that sum over the units: if they are zero there, a unit has no effect
    grouped: tuple[str, ...] = ()  # weights of grouped convolutions and group norms whose groups are these units


@dataclass(frozen=True)
class Structure:
    groups: tuple[UnitGroup, ...]
    left_alone: tuple[str, ...]  # messages: what can't be pruned, and why


def structure_of(model: nn.Module, example: Callable[[nn.Module], Any]) -> Structure:
    """Find the unit groups of a model by running it once. The model should be in eval mode."""
    found = trace_axes(model, example)
    places = places_of(found)
    heads = {id(axis) for dim in found.heads for axis in leaves(dim)}
    channels = {id(axis) for dim in found.channels for axis in leaves(dim)}
    readers = readers_of(found)
    beside = neighbours(found)
    groups: list[UnitGroup] = []
    told: dict[str, None] = {}
    for key, (axis, where) in places.items():
        kind = "heads" if key in heads else "channels" if key in channels else "neurons"
        why = axis.frozen or ("" if readers.get(key) else "no weight sums over it")
        if not why and kind == "neurons" and beside[key] & heads:
            why = "it is the width of a head"
        rivals = [
            other
            for other in beside[key]
            if other in places
            and not places[other][0].frozen
            and readers.get(other)
            and ((other in heads) == (key in heads))
        ]
        if not why and any(better(places[other], (axis, where)) for other in rivals):
            why = "it lies inside a larger unit, which is pruned instead"
        if why:
            told[f"{where[0].weight} dimension {where[0].dim} ({axis.size}): {why}"] = None
            continue
        name = f"{kind} {where[0].weight}:{where[0].dim}"
        grouped = tuple(
            dict.fromkeys(weight for weight, dim in found.groups if any(leaf is axis for leaf in leaves(dim)))
        )
        groups.append(UnitGroup(name, kind, axis.size, tuple(where), readers[key], grouped))
    return Structure(
        unique(groups), (*told, *(f"the operator {name} can't be traced" for name in sorted(found.unknown)))
    )


def places_of(found: TracedForward) -> dict[int, tuple[UnitAxis, list[UnitPlace]]]:
    """All axes of weights, by identity, with their places."""
    places: dict[int, tuple[UnitAxis, list[UnitPlace]]] = {}
    for name, known in found.weights.items():
        for dim, axes in enumerate(known.dims):
            along = leaves(axes)
            for at, axis in enumerate(along):
                place = UnitPlace(
                    name, dim, prod(one.size for one in along[:at]), prod(one.size for one in along[at + 1 :])
                )
                places.setdefault(id(axis), (axis, []))[1].append(place)
    return places


def readers_of(found: TracedForward) -> dict[int, tuple[str, ...]]:
    readers: dict[int, dict[str, None]] = {}
    for name, dim in found.readers:
        for axis in leaves(dim):
            readers.setdefault(id(axis), {})[name] = None
    return {key: tuple(names) for key, names in readers.items()}


def neighbours(found: TracedForward) -> dict[int, set[int]]:
    """For every axis of a weight, the other axes in the same dimension of some weight."""
    beside: dict[int, set[int]] = {}
    for known in found.weights.values():
        for axes in known.dims:
            along = [id(axis) for axis in leaves(axes)]
            for key in along:
                beside.setdefault(key, set()).update(set(along) - {key})
    return beside


def better(one: tuple[UnitAxis, list[UnitPlace]], other: tuple[UnitAxis, list[UnitPlace]]) -> bool:
    """Whether `one` should be pruned rather than `other`, in the same dimension: the axis in more places (key and value
    heads rather than the queries of one), then the larger one."""
    first, second = (len(one[1]), one[0].size), (len(other[1]), other[0].size)
    return first > second or (first == second and one[1][0].outer < other[1][0].outer)


def unique(groups: list[UnitGroup]) -> tuple[UnitGroup, ...]:
    """The same groups with unique names."""
    seen: dict[str, int] = {}
    result = []
    for group in groups:
        seen[group.name] = count = seen.get(group.name, 0) + 1
        result.append(group if count == 1 else replace(group, name=f"{group.name}#{count}"))
    return tuple(result)
