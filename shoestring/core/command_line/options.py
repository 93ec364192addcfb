"""Spelling of options: a flag on the command line, an argument in a script.

Messages are written for the command line by whatever code raises them, perhaps in a worker. The library translates them
for scripts in one place:

    --memory 600MiB    memory="600MiB"        --inexact        inexact=True        --devices    devices=
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from shoestring.core.command_line.arguments import OptionField, flat_arguments
from shoestring.core.command_line.command import named_object
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.rooms import installed_rooms

TRACEBACK = re.compile(r"[;,] add --traceback to see (?:where|more)")


@cache
def known_options() -> Mapping[str, OptionField]:
    """What can be asked for in any room, by its flag without dashes."""
    kinds = {
        command.options: named_object(command.options) for room in installed_rooms() for command in room.commands()
    }
    fields = [pair for kind in kinds.values() for pair in flat_arguments(kind)]
    return {one.flag.removeprefix("--") or name.replace("_", "-"): one for name, one in fields}


@cache
def flag_pattern() -> re.Pattern[str]:
    """A flag, with its value as messages write it: a number, a quoted text, or one of its choices."""
    words = sorted({word for one in known_options().values() for word in one.choices})
    value = "|".join((r"\d[\w.]*", "'[^']*'", '"[^"]*"', *(rf"{re.escape(word)}\b" for word in words)))
    return re.compile(rf"(?<![\w-])--([a-z][a-z-]*)(?:[ =]({value}))?")


def as_arguments(text: str) -> str:
    """A command-line message, rewritten for somebody who called a function.

    >>> as_arguments("nothing fits: --inexact allows bf16; give --exact rounding, fewer --devices, or --devices 2")
    'nothing fits: inexact=True allows bf16; give exact="rounding", fewer devices=, or devices=2'
    >>> as_arguments("--memory 600: did you mean 600MiB?"), as_arguments("a --width of 64 -- and a rule --")
    ('memory=600: did you mean 600MiB?', 'a width of 64 -- and a rule --')
    """

    def spelt(found: re.Match[str]) -> str:
        name, value, asked = found[1].replace("-", "_"), found[2], known_options().get(found[1])
        after = f" {value}" if value else ""
        if asked is not None and asked.default is False:
            return f"{name}=True{after}"
        if asked is None and not value:
            return name
        if value is None:
            return f"{name}="
        return f"{name}={value}" if value[0] in QUOTES or value.isdigit() else f'{name}="{value}"'

    return flag_pattern().sub(spelt, TRACEBACK.sub("", text))


QUOTES = "'\""


@contextmanager
def speaking_of_arguments() -> Iterator[None]:
    """While inside, messages to the user speak of arguments."""
    try:
        yield
    except (Mistake, OverBudget) as error:
        error.args = (as_arguments(str(error)), *error.args[1:])
        raise
