"""Options of a command, as one frozen dataclass: each field is a flag on the command line and an argument in the
library.

    size: str | int | None = argument("BYTES", "most bytes on disk")    ->    --size BYTES    size="16MB"
    run: RunOptions = group(RunOptions)                                 ->    the flags and arguments of its fields

A class of options becomes a dataclass only when something inspects it, because importing `dataclasses` takes as long as
the rest of an answer about a wrong flag.

Contract: library and command line have the same arguments with the same defaults (tests/core/command_line/test_arguments.py).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 (exported)
    from typing import Any, TypeVar

    T = TypeVar("T")
else:

    def dataclass(*, frozen: bool) -> Callable[[type[T]], type[T]]:
        """dataclasses.dataclass, applied when it is needed."""
        assert frozen, "options do not change"

        def prepare(kind: type[T]) -> type[T]:
            kind.ARGUMENTS = {name: value for name, value in vars(kind).items() if isinstance(value, OptionField)}
            kind.__init__ = first_values
            kind.__dataclass_fields__ = Pending()
            return kind

        return prepare


class Pending:
    """Stands in for a dataclass's fields until they are needed, and then makes the class a dataclass."""

    def __get__(self, value: object, kind: type[Any]) -> Any:
        make_dataclass(kind)
        return vars(kind)["__dataclass_fields__"]


def first_values(self: Any, *values: Any, **named: Any) -> None:
    """A constructor for classes that are no dataclass yet: makes the class one first."""
    kind = type(self)
    if "dataclasses" in sys.modules:
        make_dataclass(kind)
        kind.__init__(self, *values, **named)
        return
    given = {**dict(zip(kind.ARGUMENTS, values, strict=False)), **named}
    for name, one in arguments_of(kind).items():
        usual = one.group() if one.group and name not in given else one.default
        vars(self)[name] = given.get(name, usual)


class OptionField:
    """How one field is written: its flag, its help, its type."""

    def __init__(self, metavar: str, help: str, default: Any = None) -> None:
        self.metavar, self.help, self.default = metavar, help, default
        self.choices: tuple[str, ...] = ()
        self.repeated = self.positional = self.command_only = self.required = False
        self.flag = ""  # empty: derived from the field's name
        self.read: Callable[[str], Any] | None = None  # parses the typed text
        self.group: type[Any] | None = None  # class of nested options whose fields these are


def argument(
    metavar: str,
    help: str,
    default: Any = None,
    *,
    choices: Sequence[str] = (),
    repeated: bool = False,
    positional: bool = False,
    command_only: bool = False,
    required: bool = False,
    flag: str = "",
    read: Callable[[str], Any] | None = None,
) -> Any:
    """A field with a flag. `repeated`: the field is a tuple and the flag may be given several times; `command_only`: it
    exists on the command line only."""
    made = OptionField(metavar, help, default)
    made.choices, made.repeated, made.flag, made.read = tuple(choices), repeated, flag, read
    made.positional, made.command_only, made.required = positional, command_only, required
    return made


def group(kind: type[T]) -> Any:
    """A field that holds nested options; their flags and arguments appear beside the class's own."""
    made = OptionField("", "")
    made.group = kind
    return made


def make_dataclass(kind: type[Any]) -> None:
    import dataclasses

    del kind.__init__
    for name, one in arguments_of(kind).items():
        usual: Any = {"default_factory": one.group} if one.group else {"default": one.default}
        setattr(kind, name, dataclasses.field(**usual))
    dataclasses.dataclass(frozen=True)(kind)


def arguments_of(kind: type[Any]) -> Mapping[str, OptionField]:
    """The fields of a class of options, by name."""
    found: Mapping[str, OptionField] = kind.ARGUMENTS
    return found


def flat_arguments(kind: type[Any]) -> Iterator[tuple[str, OptionField]]:
    """All fields, with those of nested options."""
    for name, one in arguments_of(kind).items():
        yield from flat_arguments(one.group) if one.group else [(name, one)]


def add_flags(parser: ArgumentParser, kind: type[Any]) -> None:
    """The flags of a command, one for each field."""
    for name, one in flat_arguments(kind):
        settings: dict[str, Any] = {"help": one.help, "default": one.default}
        if one.default is False:
            settings["action"] = "store_true"
        elif one.choices:
            settings["choices"] = list(one.choices)
        else:
            settings["metavar"] = one.metavar
        if one.read is not None:
            settings["type"] = one.read
        if one.positional:
            del settings["default"]
            settings |= {"nargs": "+"} if one.repeated else {}
            parser.add_argument(name, **settings)
            continue
        if one.required:
            settings["required"] = True
        if one.repeated:
            settings |= {"action": "append", "default": None}
        parser.add_argument(one.flag or f"--{name.replace('_', '-')}", dest=name, **settings)


def given_values(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The value given for each field, by flag or argument; fields that were not given keep their default."""
    found = {}
    for name, one in flat_arguments(kind):
        value = given.get(name, one.default)
        found[name] = (one.default if value is None else tuple(value)) if one.repeated else value
    return found


def options_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """An instance of a class of options, from the values given for its fields."""
    written = given_values(kind, given)
    return kind(
        **{
            name: options_of(one.group, given) if one.group else written[name]
            for name, one in arguments_of(kind).items()
        }
    )
