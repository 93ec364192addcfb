"""Pairs of techniques that can't be combined, each with the reason. The planner reads it and the user sees it."""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations

from shoestring.core.training import TrainingTechnique as Technique

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
    frozenset({"Shard", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; with Shard every worker sees a part of them",
    frozenset({"CompressGradients", "Precision(fp16)"}):
        "what a message leaves out is kept back at the loss scale of its step, and that scale changes",
    frozenset({"LocalSteps", "Precision(fp16)"}):
        "between two meetings every worker would have a loss scale of its own",
    **{frozenset({served, other}): reason for served in ("Asynchronous", "DropStragglers") for other, reason in (
        ("OffloadOptimizer", "weights are stepped whenever a gradient arrives; OffloadOptimizer's file has one step after the other"),
        ("Precision(fp16)", "fp16 must look at all gradients of a step for overflow; here every worker has its own, and its own scale"),
    )},
    frozenset({"Stream", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; Stream moves them block by block",
}


# Techniques that can't be combined with any that unites workers
APART = {
    "StepInBackward": "a gradient is whole only when all workers have added theirs; StepInBackward moves a weight before",
    "Stream": "a gradient is whole only when all workers have added theirs; Stream moves a block before",
    "OffloadOptimizer(disk)": "the state on disk is one worker's; Shard divides the optimizer's state between workers instead",
}


def label(technique: Technique) -> str:
    """What a technique is called in the table when its dtype or place matters."""
    return f"{type(technique).__name__}({getattr(technique, 'dtype', '') or getattr(technique, 'to', '')})"


def clash(one: Technique, other: Technique) -> str:
    """Why two techniques can't be combined; empty if they can."""
    if one.unites and one.unites == other.unites and type(one) is not type(other):
        return "both unite the workers: choose one"
    if one.unites or other.unites:
        alone = one if other.unites else other
        if (reason := APART.get(type(alone).__name__, "") or APART.get(label(alone), "")):
            return reason
    return known_clash(type(one).__name__, label(one), type(other).__name__, label(other))


@cache
def known_clash(one: str, one_label: str, other: str, other_label: str) -> str:
    if one == other:
        return f"{one} twice: choose one of its settings"
    pairs = (frozenset({a, b}) for a in (one, one_label) for b in (other, other_label))
    return next((CONFLICTS[pair] for pair in pairs if pair in CONFLICTS), "")


def conflict(techniques: Iterable[Technique]) -> str:
    """Why these can't be combined; empty if they can."""
    return next(filter(None, (clash(one, other) for one, other in combinations(techniques, 2))), "")
