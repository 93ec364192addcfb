"""Spelling of options: a flag on the command line, an argument in a script.

Messages are written for the command line by whatever code raises them, perhaps in a worker. The library translates them
for scripts in one place:

    --memory 600MiB    memory="600MiB"        --inexact        inexact=True        --devices    devices=
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from shoestring.core.errors import Mistake, OverBudget

SWITCHES = ("inexact", "fresh", "adopt", "replan", "fresh-plan")  # flags without a value
VALUED = (
    "memory",
    "use",
    "devices",
    "hardware",
    "exact",
    "steps",
    "epochs",
    "seed",
    "run",
    "save-every",
    "job",
    "plan",
    "rounds",
    "per-round",
    "clients",
    "upload",
    "download",
    "epsilon",
    "delta",
    "time",
    "every",
    "processes",
    "ledger",
    "ledger-epsilon",
    "insecure-seed",
    "statistics",
)  # arguments of the library
VALUE = (
    r"\d[\w.]*|'[^']*'|\"[^\"]*\"|bits\b|rounding\b|distribution\b|frozen\b|local\b"  # values as messages write them
)
TRACEBACK = re.compile(r"[;,] add --traceback to see (?:where|more)")
FLAG = re.compile(rf"(?<![\w-])--([a-z][a-z-]*)(?:[ =]({VALUE}))?")


def as_arguments(text: str) -> str:
    """A command-line message, rewritten for somebody who called a function.

    >>> as_arguments("nothing fits: --inexact allows bf16; give --exact rounding, fewer --devices, or --devices 2")
    'nothing fits: inexact=True allows bf16; give exact="rounding", fewer devices=, or devices=2'
    >>> as_arguments("--memory 600: did you mean 600MiB?"), as_arguments("a --width of 64 -- and a rule --")
    ('memory=600: did you mean 600MiB?', 'a width of 64 -- and a rule --')
    """

    def spelt(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        after = f" {value}" if value else ""
        if found[1] in SWITCHES:
            return f"{name}=True{after}"
        if found[1] not in VALUED and not value:
            return name
        if value is None:
            return f"{name}="
        return f"{name}={value}" if value[0] in QUOTES or value.isdigit() else f'{name}="{value}"'

    return FLAG.sub(spelt, TRACEBACK.sub("", text))


QUOTES = "'\""


@contextmanager
def speaking_of_arguments() -> Iterator[None]:
    """While inside, messages to the user speak of arguments."""
    try:
        yield
    except (Mistake, OverBudget) as error:
        error.args = (as_arguments(str(error)), *error.args[1:])
        raise
