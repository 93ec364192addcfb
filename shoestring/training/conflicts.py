"""Pairs of techniques that can't be combined, each with the reason. The planner reads it and the user sees it.

A technique stands here under any of the names that it is `called` by: its own, that of one of its settings (its label), or one that
several techniques share.
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import combinations
from typing import Any

from shoestring.core.technique import Technique
from shoestring.training.technique import UNITING

# With these, the workers of one copy of the model hold different weights
HOLDERS = (("Pipeline", "every stage"), ("TensorParallel", "every worker along tensor"))
CONFLICTS: dict[frozenset[str], str] = {
    frozenset({"StepInBackward", "Accumulate"}):
        "StepInBackward updates and frees a gradient at once; Accumulate needs it to stay until the last piece",
    frozenset({"SequencePipeline", "StepInBackward"}):
        "StepInBackward updates and frees a gradient at once; SequencePipeline needs it to stay until the first slice has run backward",
    frozenset({"SequencePipeline", "OffloadModel"}):
        "OffloadModel runs every block backward once in a step; with SequencePipeline it runs backward once for every slice",
    frozenset({"SequencePipeline", "Pipeline(zero-bubble)"}):
        "a slice runs backward when all later ones have, whole; zero-bubble runs backward in two halves: use schedule='gpipe' or '1f1b'",
    frozenset({"SequencePipeline", "Pipeline(pipedream)"}):
        "all slices of a sequence meet the same weights; pipedream moves them after every piece: use schedule='gpipe' or '1f1b'",
    frozenset({"SequencePipeline", "OffloadActivations"}):
        "OffloadActivations's file is written from its start by every forward; with SequencePipeline all slices run forward before any runs backward",
    frozenset({"StepInBackward", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; StepInBackward moves them one by one",
    frozenset({"OffloadModel", "StepInBackward"}):
        "OffloadModel steps every weight in backward itself",
    frozenset({"OffloadModel", "OffloadOptimizer"}):
        "OffloadModel keeps the moments on disk itself",
    frozenset({"OffloadModel", "Checkpoint"}):
        "OffloadModel computes every block again itself, when its weights are in memory",
    frozenset({"Shard", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; with Shard every worker sees a part of them",
    frozenset({"LowRank", "Shard"}):
        "Shard divides the model's weights between workers, and LowRank trains updates beside them, too small to be divided: use DataParallel",
    frozenset({"Pipeline", "OffloadActivations"}):
        "OffloadActivations's files follow one forward and its backward; in a pipeline several pieces are on their way at once: use Checkpoint",
    frozenset({"Pipeline", "LowRank"}):
        "LowRank trains updates beside the model's weights, and Pipeline knows which stage holds which of the model's own",
    frozenset({"Pipeline", "Shard(stage=3)"}):
        "Shard(stage=3) sends the weights of a block before every forward, and a pipeline has many of them in a step; use Shard(stage=1)",
    frozenset({"Pipeline", "EMA"}):
        "EMA averages whole models, and with Pipeline a worker has the weights of its stages alone",
    frozenset({"Pipeline", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; with Pipeline every worker sees those of its stages",
    frozenset({"Pipeline(pipedream)", f"{UNITING} along data"}):
        "copies add up the gradients of a whole batch, and pipedream has moved the weights after every piece by then: give as many stages "
        "as devices, or use schedule='1f1b'",
    frozenset({"Pipeline(pipedream)", "TensorParallel"}):
        "pipedream keeps versions of whole layers, and with TensorParallel a worker has parts of them: use schedule='1f1b'",
    frozenset({"Pipeline(pipedream)", "Accumulate"}):
        "Accumulate adds up the gradients of pieces, and pipedream moves the weights after each: give it fewer pieces instead",
    frozenset({"CompressGradients", "Precision(fp16)"}):
        "what a message leaves out is kept back at the loss scale of its step, and that scale changes",
    frozenset({"LocalSteps", "Precision(fp16)"}):
        "between two meetings every worker would have a loss scale of its own",
    **{frozenset({served, other}): reason for served in ("Asynchronous", "DropStragglers") for other, reason in (
        ("OffloadOptimizer", "weights are stepped whenever a gradient arrives; OffloadOptimizer's file has one step after the other"),
        ("Precision(fp16)", "fp16 must look at all gradients of a step for overflow; here every worker has its own, and its own scale"),
    )},
    frozenset({"OffloadModel", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; OffloadModel moves them block by block",
    frozenset({"EMA", "LowRank"}):
        "EMA averages the model's weights, and LowRank trains updates beside them, which it does not know",
    frozenset({"EMA", "OffloadModel"}):
        "EMA keeps an average of all weights in memory; OffloadModel is there because they do not fit",
    frozenset({"EMA", "Shard(stage=3)"}):
        "EMA averages whole weights, and with Shard(stage=3) a worker has a part of them; Shard(stage=2) goes with it",
    **{frozenset({"EMA", apart}): "between two meetings every worker has weights, and so an average, of its own"
       for apart in ("LocalSteps", "CompressGradients(topk)")},
    **{frozenset({"EMA", served}): "weights move whenever a gradient arrives, so an average by steps would depend on who came when"
       for served in ("Asynchronous", "DropStragglers")},
    frozenset({"TensorParallel", "LowRank"}):
        "LowRank trains updates beside whole weights, and with TensorParallel a worker has parts of them",
    frozenset({"TensorParallel", "Precision(fp16)"}):
        "fp16 must look at all gradients for overflow before any weight moves; with TensorParallel every worker sees those of its parts",
    frozenset({"TensorParallel", "Precision(weights)"}):
        "TensorParallel has parts of the weights that the model was made with, and 16-bit weights are others: leave weights= out",
    frozenset({"TensorParallel", "Shard(stage=3)"}):
        "both keep parts of weights, and a checkpoint knows how to put one kind together: Shard(stage=2) goes with TensorParallel",
    frozenset({"TensorParallel", "EMA"}):
        "EMA averages whole weights, and with TensorParallel a worker has parts of them",
    **{frozenset({axis, served}): "the first worker keeps whole weights for all others, and here each has its parts"
       for axis, _ in HOLDERS for served in ("Asynchronous", "DropStragglers")},
    **{frozenset({axis, "LocalSteps"}):
       f"what LocalSteps keeps between two meetings is saved by the first worker alone, and {whose} has its own"
       for axis, whose in HOLDERS},
    **{frozenset({axis, f"CompressGradients({kind})"}):
       f"what {kind} keeps from step to step is saved by the first worker alone, and {whose} has its own: use kind='int8'"
       for axis, whose in HOLDERS for kind in ("topk", "powersgd")},
    frozenset({"TensorParallel", "OffloadOptimizer"}):
        "OffloadOptimizer keeps the state of whole weights, and with TensorParallel a worker has parts of them",
    **{frozenset({f"{UNITING} along {axis}"}): "both unite the workers: choose one" for axis in ("data", "stage", "tensor")},
    frozenset({UNITING, "StepInBackward"}):
        "a gradient is whole only when all workers have added theirs; StepInBackward moves a weight before",
    frozenset({UNITING, "OffloadModel"}):
        "a gradient is whole only when all workers have added theirs; OffloadModel moves a block before",
    frozenset({UNITING, "OffloadOptimizer(disk)"}):
        "the state on disk is one worker's; Shard divides the optimizer's state between workers instead",
}

KNOWN = frozenset(name for pair in CONFLICTS for name in pair)


def clash(one: Technique[Any, Any], other: Technique[Any, Any]) -> str:
    """Why two techniques can't be combined; empty if they can."""
    return known_clash(names(one), names(other))


@lru_cache(1 << 16)   # a search asks with every step that it takes
def names(technique: Technique[Any, Any]) -> tuple[str, ...]:
    """A technique's own name, and those of its others that are in the table."""
    own, *others = technique.called
    return own, *(name for name in others if name in KNOWN)


@cache
def known_clash(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    if one[0] == other[0]:
        return f"{one[0]} twice: choose one of its settings"
    pairs = (frozenset({a, b}) for a in one for b in other)
    return next((CONFLICTS[pair] for pair in pairs if pair in CONFLICTS), "")


def conflict(techniques: Iterable[Technique[Any, Any]]) -> str:
    """Why these can't be combined; empty if they can."""
    return next(filter(None, (clash(one, other) for one, other in combinations(techniques, 2))), "")
