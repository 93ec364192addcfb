"""Frozen values to JSON and back: one codec for all files and all messages between processes.

    dataclass           {"field": ...}; a class with a VERSION has "version" too
    tuple, list, set    [...]
    Mapping             {...}, its keys as text
    Enum                its name
    Path                text

A class may define its own `as_json` and `from_json` (a technique is written by its name). Unknown keys are refused in
requests, where a misspelt key would silently be a default, and ignored in reports, so that an older reader can read
what a newer writer wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints, runtime_checkable

T = TypeVar("T")
Json = Any  # None, bool, int, float, str, or a list or dict of these


class Unreadable(ValueError):
    """JSON that can't be turned into a value; the text says where and why."""


@runtime_checkable
class HasJson(Protocol):
    """A class with a JSON form of its own; `from_json`, a class method, reads it back if it is read at all."""

    def as_json(self) -> Json: ...


def finite_json(value: Json) -> Json:
    """The same JSON with null for numbers that are not finite: JSON has none, and most readers refuse `NaN`.

    >>> finite_json({"losses": [1.5, float("nan")], "best": (float("inf"), 2)})
    {'losses': [1.5, None], 'best': [None, 2]}
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_json(one) for name, one in value.items()}
    return [finite_json(one) for one in value] if isinstance(value, list | tuple) else value


def to_json(value: object) -> Json:
    """
    >>> to_json({"where": Path("a"), "sizes": (1, 2)})
    {'where': 'a', 'sizes': [1, 2]}
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, HasJson) and not isinstance(value, type):
        return value.as_json()
    if is_dataclass(value) and not isinstance(value, type):
        version = {"version": kind.VERSION} if hasattr(kind := type(value), "VERSION") else {}
        return version | {one.name: to_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): to_json(one) for key, one in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [to_json(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value


def from_json(kind: type[T], data: Json, unknown: str = "refused") -> T:
    """A value of class `kind` from its JSON. `unknown`: keys that the class does not have are "refused" or
    "ignored"."""
    return make_value(kind, data, unknown == "ignored", kind.__name__)  # type: ignore[no-any-return]


def make_value(kind: Any, data: Json, lenient: bool, where: str) -> Any:
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return data
    if origin in (Union, UnionType):
        return one_of(inside, data, lenient, where)
    if isinstance(kind, type) and hasattr(kind, "from_json"):
        return kind.from_json(data)
    if is_dataclass(kind):
        return dataclass_of(kind, data, lenient, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return enum_of(kind, data, where)
    if kind is Path:
        return Path(plain(str, data, where))
    if origin in (tuple, list, frozenset, set) or kind in (tuple, list):
        return sequence_of(origin or kind, inside, data, lenient, where)
    if origin is Sequence:
        return sequence_of(list, inside, data, lenient, where)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        entries = plain(dict, data, where)
        return {
            make_value(inside[0], key_of(inside[0], key), lenient, where): make_value(
                inside[1], one, lenient, f"{where}.{key}"
            )
            for key, one in entries.items()
        }
    return plain(kind if isinstance(kind, type) else object, data, where)


def key_of(kind: Any, key: str) -> Json:
    """A key as it was before it was written as text."""
    return int(key) if kind is int and key.isdecimal() else key


def dataclass_of(kind: Any, data: Json, lenient: bool, where: str) -> Any:
    given = plain(dict, data, where)
    hints, known = hints_of(kind), {one.name: one for one in fields(kind)}
    if "version" in given and "version" not in known:
        version = getattr(kind, "VERSION", 1)
        if not isinstance(given["version"], int) or given["version"] > version:
            raise Unreadable(
                f"{where} is of version {given['version']}, and this shoestring reads up to {version}: use a newer one"
            )
        given = {name: one for name, one in given.items() if name != "version"}
    strange = sorted(set(given) - set(known))
    if strange and not lenient:
        raise Unreadable(f"{where} has {strange[0]!r}, which is unknown; it has {', '.join(known)}")
    missing = [
        name
        for name, one in known.items()
        if name not in given and one.default is MISSING and one.default_factory is MISSING
    ]
    if missing:
        raise Unreadable(f"{where} lacks {missing[0]!r}")
    return kind(
        **{
            name: make_value(hints[name], one, lenient, f"{where}.{name}")
            for name, one in given.items()
            if name in known
        }
    )


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def one_of(kinds: tuple[Any, ...], data: Json, lenient: bool, where: str) -> Any:
    if data is None and NoneType in kinds:
        return None
    wrong = []
    for kind in (one for one in kinds if one is not NoneType):
        try:
            return make_value(kind, data, lenient, where)
        except Unreadable as error:
            wrong.append(str(error))
    raise Unreadable(wrong[0] if wrong else f"{where} is {data!r}")


def enum_of(kind: type[Enum], data: Json, where: str) -> Enum:
    if isinstance(data, str) and data in kind.__members__:
        return kind[data]
    raise Unreadable(f"{where} is {data!r}: there are {', '.join(kind.__members__)}")


def sequence_of(kind: Any, inside: tuple[Any, ...], data: Json, lenient: bool, where: str) -> Any:
    entries = plain(list, list(data) if isinstance(data, tuple) else data, where)
    fixed = kind is tuple and bool(inside) and inside[-1] is not Ellipsis
    if not fixed and inside and inside[0] in (int, float, str) and all(type(one) is inside[0] for one in entries):
        return kind(entries)  # as fast as a list comprehension, even for a million losses
    if (
        not fixed
        and inside
        and get_origin(inside[0]) is tuple
        and all(one in (int, float, str) for one in get_args(inside[0]))
    ):
        wanted = list(get_args(inside[0]))  # as fast as above, for a million log events
        if all(type(one) is list and list(map(type, one)) == wanted for one in entries):
            return kind(map(tuple, entries))
    if fixed:
        if len(entries) != len(inside):
            raise Unreadable(f"{where} has {len(entries)} entries, not {len(inside)}")
        both = enumerate(zip(inside, entries, strict=True))
        return tuple(make_value(one, entry, lenient, f"{where}[{number}]") for number, (one, entry) in both)
    return kind(
        make_value(inside[0] if inside else Any, entry, lenient, f"{where}[{number}]")
        for number, entry in enumerate(entries)
    )


def plain(kind: type, data: Json, where: str) -> Any:
    """A number, text, list or dict of this type. An int may stand for a float; bools are not numbers."""
    fits = isinstance(data, kind) or (kind is float and isinstance(data, int))
    if not fits or (isinstance(data, bool) and kind in (int, float)):
        raise Unreadable(f"{where} is {data!r}, not {kind.__name__}")
    try:
        number = (
            float(data) if kind in (int, float) else 0.0
        )  # an int field is shown as a float in tables, so it must fit one
        return number if kind is float else data
    except OverflowError:
        raise Unreadable(f"{where} is a number that no float can hold") from None
