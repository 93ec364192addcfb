"""Edits of a model as data: what is kept of which dimension, which attributes follow, which blocks go. Applied, they make a new model.

Names are those of the whole model. A model that was just made, on any device (meta too), gets the same shapes as the one that the
edits were chosen for.
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
from shoestring.core.codec import Json, Unreadable, to_json
from shoestring.core.codec import from_json as value_from_json
from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class UnitCut:
    """What is kept of the units of one group, in every place where they lie."""

    name: str
    kind: str  # heads, neurons or channels
    size: int  # units there were
    kept: tuple[int, ...]
    places: tuple[UnitPlace, ...]
    readers: tuple[str, ...]  # weights that sum over the units


@dataclass(frozen=True)
class Narrow:
    """An nn.MultiheadAttention becomes one whose heads need not fill the width of the model."""

    module: str


@dataclass(frozen=True)
class Attribute:
    """A number (or a list with an entry a layer) that a module keeps, or the `config` of one, follows the cut."""

    module: str
    name: str
    value: int | float | str | bool | list[int | float | str | bool]
    config: bool = False  # it is an attribute of the module's config


@dataclass(frozen=True)
class Drop:
    """What is kept of the blocks in a list or sequence; names after this are those of a shorter list."""

    container: str
    size: int
    kept: tuple[int, ...]


LONGEST = 1 << 16  # hexadecimal digits of a bitmap of units
Edit = UnitCut | Narrow | Attribute | Drop
EDITS: dict[str, Any] = {kind.__name__: kind for kind in (UnitCut, Narrow, Attribute, Drop)}


def edited(model: nn.Module, edits: Sequence[Edit]) -> nn.Module:
    """A new model with the edits made; the given one is not changed. Weights that are shared stay shared.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> places = UnitPlace("0.weight", 0, 1, 1), UnitPlace("0.bias", 0, 1, 1), UnitPlace("2.weight", 1, 1, 1)
    >>> cut = UnitCut("neurons 0.weight:0", "neurons", 8, (1, 5), places, ("2.weight",))
    >>> [tuple(weight.shape) for weight in edited(model, [cut]).parameters()]
    [(2, 3), (2,), (2, 2), (2,)]
    """
    return edited_with_names(model, edits)[0]


def edited_with_names(model: nn.Module, edits: Sequence[Edit]) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The new model, and its modules by the names that they had in the whole one."""
    result = copy.deepcopy(model)
    modules = dict(result.named_modules(remove_duplicate=False))  # names are those before a list gets shorter
    for edit in edits:
        match edit:
            case UnitCut():
                for place in edit.places:
                    cut_weight(result, modules, edit, place)
            case Narrow(name):
                narrow(result, modules, name)
            case Attribute():
                owner: Any = holder(modules, edit.module)
                owner = getattr(owner, "config", None) if edit.config else owner
                check_attribute(owner, edit)
                setattr(owner, edit.name, edit.value)
            case Drop():
                drop(modules, edit)
    return result, modules


def check_attribute(owner: Any, edit: Attribute) -> None:
    """Refuse to set anything but a number, a switch or a list that is there, to one of its kind. Text stays what it was: another could name
    something."""
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


def holder(modules: dict[str, nn.Module], name: str) -> nn.Module:
    if name not in modules:
        raise Mistake(f"the model has no module {name!r}: these edits are of another model")
    return modules[name]


def cut_weight(model: nn.Module, modules: dict[str, nn.Module], cut: UnitCut, place: UnitPlace) -> None:
    path, _, name = place.weight.rpartition(".")
    weight = getattr(holder(modules, path), name, None)
    wanted = place.outer * cut.size * place.inner
    if not isinstance(weight, Tensor) or weight.dim() <= place.dim or weight.shape[place.dim] != wanted:
        seen = f"is of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "is not there"
        raise Mistake(
            f"{place.weight} {seen}, the cut is of one with {wanted} in dimension {place.dim}: these edits are of another model"
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
    """The indices that stay of a dimension outer x size x inner.

    >>> indices((0, 2), 3, UnitPlace("w", 0, 2, 2)).tolist()
    [0, 1, 4, 5, 6, 7, 10, 11]
    """
    numbers = torch.arange(place.outer * size * place.inner).view(place.outer, size, place.inner)
    return numbers[:, list(kept)].flatten()


def narrow(model: nn.Module, modules: dict[str, nn.Module], name: str) -> None:
    whole = holder(modules, name)
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
    container: Any = holder(modules, edit.container)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or len(container) != edit.size:
        raise Mistake(
            f"{edit.container or 'the model'} is no list of {edit.size} blocks: these edits are of another model"
        )
    for place in reversed(range(edit.size)):
        if place not in edit.kept:
            del container[place]


def as_json(edits: Iterable[Edit]) -> Json:
    """The edits as JSON; which units are kept is a bitmap in hexadecimal digits."""
    return [
        {"edit": type(edit).__name__}
        | to_json(edit)
        | ({"kept": bitmap(edit.kept)} if isinstance(edit, (UnitCut, Drop)) else {})
        for edit in edits
    ]


def from_json(data: Json) -> tuple[Edit, ...]:
    """
    >>> edits = (Drop("layers", 6, (0, 2, 5)), Attribute("", "num_layers", 3))
    >>> from_json(as_json(edits)) == edits
    True
    """
    if not isinstance(data, list) or any(not isinstance(one, dict) or one.get("edit") not in EDITS for one in data):
        raise Mistake(
            f"the edits of a model are a list of {', '.join(EDITS)}, not what is there: take a folder that was not changed"
        )
    return tuple(one_from_json(dict(one)) for one in data)


def one_from_json(data: dict[str, Json]) -> Edit:
    kind = EDITS[data.pop("edit")]
    try:
        if kind in (UnitCut, Drop):
            data["kept"] = list(units(data["kept"]))
        edit: Edit = value_from_json(kind, data)
    except (Unreadable, KeyError, TypeError, ValueError) as error:
        raise Mistake(f"an edit of the model can't be read ({error}): take a folder that was not changed") from None
    if isinstance(edit, (UnitCut, Drop)) and (not edit.kept or edit.kept[-1] >= edit.size):
        raise Mistake(
            f"an edit keeps unit {max(edit.kept, default=None)} of {edit.size}: take a folder that was not changed"
        )
    if isinstance(edit, UnitCut) and (
        edit.kind not in KINDS or any(min(p.dim, p.outer - 1, p.inner - 1) < 0 for p in edit.places)
    ):
        raise Mistake(f"the cut {edit.name} lies about its places: take a folder that was not changed")
    return edit


def bitmap(kept: Iterable[int]) -> str:
    """
    >>> bitmap((0, 1, 4)), units("13")
    ('13', (0, 1, 4))
    """
    return f"{sum(1 << unit for unit in kept):x}"


def units(text: str) -> tuple[int, ...]:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ValueError("a bitmap of units that is none")
    number = int(text, 16)
    return tuple(unit for unit in range(number.bit_length()) if number >> unit & 1)
