"""Pruning edits as data: which units of which weights are kept, which attributes change, and which blocks are dropped.

Names are those of the original model. Applied to a freshly built model on any device (meta included), the edits give
the same shapes as for the model that they were chosen for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.pruning.groups import KINDS, UnitPlace
from shoestring.compression.pruning.narrow_attention import NarrowAttention
from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Json, Unreadable, to_json
from shoestring.core.files.codec import from_json as value_from_json


@dataclass(frozen=True)
class UnitCut:
    """The kept units of one group, with all their places."""

    name: str
    kind: str  # heads, neurons or channels
    size: int  # number of units before
    kept: tuple[int, ...]
    places: tuple[UnitPlace, ...]
    readers: tuple[str, ...]  # weights that sum over the units


@dataclass(frozen=True)
class Narrow:
    """Replace an nn.MultiheadAttention by a NarrowAttention, whose heads may be narrower than the model."""

    module: str


@dataclass(frozen=True)
class Attribute:
    """Set an attribute of a module or its `config`: a size, a count, or a list with an entry per layer."""

    module: str
    name: str
    value: int | float | str | bool | list[int | float | str | bool]
    config: bool = False  # set it on the module's config


@dataclass(frozen=True)
class Drop:
    """Drop blocks of a ModuleList or Sequential; the remaining blocks are renumbered."""

    container: str
    size: int
    kept: tuple[int, ...]


LONGEST = 1 << 16  # hexadecimal digits of the longest bitmap of units
PruneEdit = UnitCut | Narrow | Attribute | Drop
EDITS: dict[str, Any] = {kind.__name__: kind for kind in (UnitCut, Narrow, Attribute, Drop)}


def apply_prune_edits(model: nn.Module, edits: Sequence[PruneEdit]) -> nn.Module:
    """Apply edits to a copy of the model. Shared weights stay shared.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> places = UnitPlace("0.weight", 0, 1, 1), UnitPlace("0.bias", 0, 1, 1), UnitPlace("2.weight", 1, 1, 1)
    >>> cut = UnitCut("neurons 0.weight:0", "neurons", 8, (1, 5), places, ("2.weight",))
    >>> [tuple(weight.shape) for weight in apply_prune_edits(model, [cut]).parameters()]
    [(2, 3), (2,), (2, 2), (2,)]
    """
    return apply_prune_edits_with_names(model, edits)[0]


def apply_prune_edits_with_names(
    model: nn.Module, edits: Sequence[PruneEdit]
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The pruned copy, and its modules by their names in the original."""
    result = copy.deepcopy(model)
    modules = dict(result.named_modules(remove_duplicate=False))  # names before blocks are renumbered
    for edit in edits:
        match edit:
            case UnitCut():
                for place in edit.places:
                    cut_weight(result, modules, edit, place)
            case Narrow(name):
                narrow(result, modules, name)
            case Attribute():
                owner: Any = module_named(modules, edit.module)
                owner = getattr(owner, "config", None) if edit.config else owner
                check_attribute(owner, edit)
                setattr(owner, edit.name, edit.value)
            case Drop():
                drop(modules, edit)
    return result, modules


def check_attribute(owner: Any, edit: Attribute) -> None:
    """Refuse edits of attributes that don't exist or would change their type. Strings may only be reordered, never
    replaced, because a new string could name a file or a function."""
    if edit.name.startswith("_") or not hasattr(owner, edit.name):
        raise Mistake(
            f"the model's {edit.module or 'root'} has no attribute {edit.name!r}: these edits are of another model"
        )
    now = getattr(owner, edit.name)
    words = (
        {edit.value}
        if isinstance(edit.value, str)
        else {one for one in edit.value if isinstance(one, str)}
        if isinstance(edit.value, list)
        else set()
    )
    there = (
        {now}
        if isinstance(now, str)
        else {one for one in now if isinstance(one, str)}
        if isinstance(now, (list, tuple))
        else set()
    )
    alike = (
        type(edit.value) is type(now)
        or (isinstance(edit.value, list) and isinstance(now, tuple))
        or (isinstance(edit.value, (int, float)) and isinstance(now, (int, float)) and not isinstance(now, bool))
    )
    if not alike or not words <= there:
        raise Mistake(
            f"the model's {edit.module or 'root'} has {edit.name} {str(now)[:40]!r}, and the edit makes it "
            f"{str(edit.value)[:40]!r}: these edits are of another model"
        )


def module_named(modules: dict[str, nn.Module], name: str) -> nn.Module:
    if name not in modules:
        raise Mistake(f"the model has no module {name!r}: these edits are of another model")
    return modules[name]


def cut_weight(model: nn.Module, modules: dict[str, nn.Module], cut: UnitCut, place: UnitPlace) -> None:
    path, _, name = place.weight.rpartition(".")
    weight = getattr(module_named(modules, path), name, None)
    wanted = place.outer * cut.size * place.inner
    if not isinstance(weight, Tensor) or weight.dim() <= place.dim or weight.shape[place.dim] != wanted:
        seen = f"has the shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "does not exist"
        raise Mistake(
            f"{place.weight} {seen}, but the cut needs {wanted} in dimension {place.dim}: these edits are of another model"
        )
    index = indices(cut.kept, cut.size, place).to(weight.device)
    new: Tensor = weight.detach().index_select(place.dim, index)
    if isinstance(weight, nn.Parameter):
        new = nn.Parameter(new, requires_grad=weight.requires_grad)
    for module in set(model.modules()):
        for own, one in [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]:
            if one is weight:
                setattr(module, own, new)


def indices(kept: Iterable[int], size: int, place: UnitPlace) -> Tensor:
    """The kept indices of a dimension of size outer x size x inner.

    >>> indices((0, 2), 3, UnitPlace("w", 0, 2, 2)).tolist()
    [0, 1, 4, 5, 6, 7, 10, 11]
    """
    numbers = torch.arange(place.outer * size * place.inner).view(place.outer, size, place.inner)
    return numbers[:, list(kept)].flatten()


def narrow(model: nn.Module, modules: dict[str, nn.Module], name: str) -> None:
    whole = module_named(modules, name)
    if not isinstance(whole, nn.MultiheadAttention):
        raise Mistake(
            f"{name} is a {type(whole).__name__}, not an nn.MultiheadAttention: these edits are of another model"
        )
    new = modules[name] = NarrowAttention(whole)
    for module in list(model.modules()):
        for own, child in list(module.named_children()):
            if child is whole:
                setattr(module, own, new)


def drop(modules: dict[str, nn.Module], edit: Drop) -> None:
    container: Any = module_named(modules, edit.container)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or len(container) != edit.size:
        raise Mistake(
            f"{edit.container or 'the model'} is not a list of {edit.size} blocks: these edits are of another model"
        )
    for place in reversed(range(edit.size)):
        if place not in edit.kept:
            del container[place]


def prune_edits_to_json(edits: Iterable[PruneEdit]) -> Json:
    """The edits as JSON; kept units are a bitmap in hexadecimal digits."""
    return [
        {"edit": type(edit).__name__}
        | to_json(edit)
        | ({"kept": bitmap(edit.kept)} if isinstance(edit, (UnitCut, Drop)) else {})
        for edit in edits
    ]


def prune_edits_from_json(data: Json) -> tuple[PruneEdit, ...]:
    """
    >>> edits = (Drop("layers", 6, (0, 2, 5)), Attribute("", "num_layers", 3))
    >>> prune_edits_from_json(prune_edits_to_json(edits)) == edits
    True
    """
    if not isinstance(data, list) or any(not isinstance(one, dict) or one.get("edit") not in EDITS for one in data):
        raise Mistake(
            f"pruning edits must be a list of {', '.join(EDITS)}: the manifest was changed, use an intact folder"
        )
    return tuple(prune_edit_from_json(dict(one)) for one in data)


def prune_edit_from_json(data: dict[str, Json]) -> PruneEdit:
    kind = EDITS[data.pop("edit")]
    try:
        if kind in (UnitCut, Drop):
            data["kept"] = list(units_of_bitmap(data["kept"]))
        edit: PruneEdit = value_from_json(kind, data)
    except (Unreadable, KeyError, TypeError, ValueError) as error:
        raise Mistake(
            f"a pruning edit can't be read ({error}): the manifest was changed, use an intact folder"
        ) from None
    if isinstance(edit, (UnitCut, Drop)) and (not edit.kept or edit.kept[-1] >= edit.size):
        raise Mistake(
            f"an edit keeps unit {max(edit.kept, default=None)} of {edit.size}: the manifest was changed, use an intact folder"
        )
    if isinstance(edit, UnitCut) and (
        edit.kind not in KINDS or any(min(p.dim, p.outer - 1, p.inner - 1) < 0 for p in edit.places)
    ):
        raise Mistake(f"the cut {edit.name} has invalid places: the manifest was changed, use an intact folder")
    return edit


def bitmap(kept: Iterable[int]) -> str:
    """
    >>> bitmap((0, 1, 4)), units_of_bitmap("13")
    ('13', (0, 1, 4))
    """
    return f"{sum(1 << unit for unit in kept):x}"


def units_of_bitmap(text: str) -> tuple[int, ...]:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ValueError("an invalid bitmap of units")
    number = int(text, 16)
    return tuple(unit for unit in range(number.bit_length()) if number >> unit & 1)
