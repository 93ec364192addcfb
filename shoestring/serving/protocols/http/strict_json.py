"""JSON from anybody: what is no JSON, or means two things, is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from shoestring.serving.protocols.http.refusals import RefusedRequest, wrong


def read_json(data: bytes) -> Any:
    """
    >>> read_json(b'{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        return json.loads(data, parse_constant=refuse_constant, object_pairs_hook=once)
    except RecursionError:
        raise wrong("", "the body is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise wrong("", f"the body is not UTF-8: byte {error.start}") from None
    except ValueError as error:  # also of a whole number with thousands of digits
        raise wrong("", f"the body is no JSON: {error}") from None


def refuse_constant(name: str) -> NoReturn:
    raise wrong("", f"the body has {name}, which is no JSON")


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(one for one, _ in pairs if sum(one == other for other, _ in pairs) > 1)
        raise wrong(name[:100], "the body names it twice")
    return found


def written_json(value: Any, of: str = "answer") -> bytes:
    """What a model or a job answered, as JSON; tensors and arrays as lists."""
    try:
        return json.dumps(value, default=plain, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedRequest(500, f"the {of} can't be written as JSON: {error}") from error


def plain(value: Any) -> Any:
    """What JSON has for a value of another library."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    for name in ("tolist", "item"):  # numpy
        if hasattr(value, name):
            return getattr(value, name)()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def checked_object(value: Any, field: str, known: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object; with `known`, of these fields only."""
    if not isinstance(value, dict):
        raise wrong(field, f"it must be an object, and is {value_text(value)}")
    for name in value:
        if known and name not in known:
            raise wrong(f"{field}.{name}"[:200].lstrip("."), f"there is no such field; there are: {', '.join(known)}")
    return value


def value_text(value: Any) -> str:
    """A JSON value in a few words.

    >>> value_text(None), value_text([1]), value_text(3)
    ('null', 'a list', '3')
    """
    words = {dict: "an object", list: "a list", type(None): "null"}
    return words.get(type(value)) or json.dumps(value)[:60]
