"""What a command can be asked for, as one frozen dataclass: its fields are the command's flags and the library's keyword arguments.

size: str | int | None = argument("BYTES", "most bytes on disk")    ->    --size BYTES    size="16MB"
"""

from __future__ import annotations

from dataclasses import field, fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence
    from typing import Any


def argument(
    metavar: str,
    help: str,
    default: Any = None,
    *,
    choices: Sequence[str] | None = None,
    repeated: bool = False,
    flag: str = "",
) -> Any:
    """A field that is a flag, too; `repeated`: it is a tuple, and its flag may be given several times; `flag`: its name, if that is not
    the field's."""
    told = {"metavar": metavar, "help": help, "choices": choices, "repeated": repeated, "flag": flag}
    return field(default=default, metadata=told)


def add_flags(parser: ArgumentParser, kind: type[Any]) -> None:
    """The flags of a command, one for each field."""
    for one in fields(kind):
        told = one.metadata
        settings: dict[str, Any] = {"dest": one.name, "help": told["help"], "default": one.default}
        if one.default is False:
            settings["action"] = "store_true"
        elif told["choices"]:
            settings["choices"] = list(told["choices"])
        else:
            settings["metavar"] = told["metavar"]
        if told["repeated"]:
            settings |= {"action": "append", "default": None}
        parser.add_argument(told["flag"] or f"--{one.name.replace('_', '-')}", **settings)


def written_by(kind: type[Any], options: Namespace) -> dict[str, Any]:
    """What was written for each field, by flags."""
    found = {}
    for one in fields(kind):
        value = vars(options)[one.name]
        if one.metadata["repeated"]:
            value = one.default if value is None else tuple(value)
        found[one.name] = value
    return found
