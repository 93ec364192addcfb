"""Parse techniques as users write them, such as Checkpoint(every=2). Imports nothing heavy, so that misspellings are
reported at once."""

from __future__ import annotations

import ast

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Any


def call_of(written: str) -> tuple[str, dict[str, Any]]:
    """The name and the knobs in a text.

    >>> call_of("Checkpoint(every=2)"), call_of("FusedOptimizer")
    (('Checkpoint', {'every': 2}), ('FusedOptimizer', {}))
    """
    try:
        call = ast.parse(written.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, {}
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        return call.func.id, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise Mistake(
            f"{written!r} is not a technique: write a name and its knobs, such as Checkpoint(every=2)"
        ) from None


# Names of techniques before 0.1 -> their present names, for the message about an old name
RENAMED = {
    "Average": "DataParallel",
    "Spill": "OffloadActivations",
    "Stream": "OffloadModel",
    "Tokens": "SequencePipeline",
    "Fused": "FusedOptimizer",
    "Ema": "EMA",
    "Quantize": "QuantizeUpdates",
}


def check_name(name: str, known: Collection[str]) -> None:
    if name not in known and RENAMED.get(name) in known:
        raise Mistake(f"{name} is called {RENAMED[name]} now: write that instead")
    if name not in known:
        raise Mistake(
            f"no technique is called {name!r}; there are {', '.join(sorted(known))}{did_you_mean(name, known)}"
        )


def check_knobs(name: str, knobs: Iterable[str], known: list[str]) -> None:
    for knob in knobs:
        if knob not in known:
            raise Mistake(
                f"{name} has no knob {knob!r}; it has {', '.join(known) or 'none'}{did_you_mean(knob, known)}"
            )
