"""Pairs of techniques that can't be combined, each with the reason. The planner reads it and the user sees it."""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations

from shoestring.core.technique import Technique

UNITED = "both unite the workers: choose one"
WHOLE = "a gradient is whole only when all workers have added theirs; {} moves a weight before"

CONFLICTS: dict[frozenset[str], str] = {
    frozenset({"StepInBackward", "Accumulate"}):
        "StepInBackward updates and frees a gradient at once; Accumulate needs it to stay until the last piece",
    frozenset({"StepInBackward", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; StepInBackward moves them one by one",
    frozenset({"Stream", "StepInBackward"}):
        "Stream steps every weight in backward itself",
    frozenset({"Stream", "OffloadOptimizer"}):
        "Stream keeps the moments on disk itself",
    frozenset({"Stream", "Checkpoint"}):
        "Stream computes every block again itself, when its weights are in memory",
    frozenset({"Stream", "Accumulate"}):
        "Stream updates a block when its gradient is there; Accumulate needs it to stay until the last piece",
    frozenset({"Average", "StepInBackward"}): WHOLE.format("StepInBackward"),
    frozenset({"Average", "Stream"}): WHOLE.format("Stream"),
    **{frozenset({served, other}): reason for served in ("Asynchronous", "DropStragglers") for other, reason in (
        ("StepInBackward", "gradients are pushed when backward is done, and move the weights then; StepInBackward moves them before"),
        ("Stream", "every worker gets all weights, which Stream keeps on disk"),
        ("OffloadOptimizer", "weights are stepped whenever a gradient arrives; OffloadOptimizer's file has one step after the other"),
        ("Precision(fp16)", "fp16 must look at all gradients of a step for overflow; here every worker has its own, and its own scale"),
    )},
    frozenset({"Stream", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; Stream moves them block by block",
}


def label(technique: Technique) -> str:
    """What a technique is called in the table when its dtype matters."""
    return f"{type(technique).__name__}({getattr(technique, 'dtype', '')})"


def clash(one: Technique, other: Technique) -> str:
    """Why two techniques can't be combined; empty if they can."""
    known = known_clash(type(one).__name__, label(one), type(other).__name__, label(other))
    return known or (UNITED if getattr(one, "unites", False) and getattr(other, "unites", False) else "")


@cache
def known_clash(one: str, one_label: str, other: str, other_label: str) -> str:
    if one == other:
        return f"{one} twice: choose one of its settings"
    pairs = (frozenset({a, b}) for a in (one, one_label) for b in (other, other_label))
    return next((CONFLICTS[pair] for pair in pairs if pair in CONFLICTS), "")


def conflict(techniques: Iterable[Technique]) -> str:
    """Why these can't be combined; empty if they can."""
    return next(filter(None, (clash(one, other) for one, other in combinations(techniques, 2))), "")
