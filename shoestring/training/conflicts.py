"""Pairs of techniques that can't be combined, each with the reason. The planner reads it and the user sees it.

A technique is listed under any of its names (`called`): its own, the label of one of its settings, or a name that
several techniques share.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import combinations
from typing import Any

from shoestring.core.technique import Technique
from shoestring.training.group_technique import UNITING

ALL_GRADIENTS = "fp16 must look at all gradients for overflow before any weight moves"
SERVED = ("Asynchronous", "DropStragglers")  # the first worker keeps the weights and serves the others
SPARSE = ("MagnitudePrune", "RandomPrune", "L0", "VariationalDropout")
GATED = ("L0", "VariationalDropout")  # of those, the ones that replace the weights in the forward of a step
# With these, the workers of one copy of the model hold different weights
HOLDERS = (("Pipeline", "every stage"), ("TensorParallel", "every worker along tensor"))

PAIRS: tuple[tuple[str, str, str], ...] = (
    # A gradient must stay, or be whole, longer than the other technique keeps it
    ("StepInBackward", "Accumulate",
     "StepInBackward updates and frees a gradient at once; Accumulate needs it to stay until the last micro-batch"),
    ("StepInBackward", "SequencePipeline",
     "StepInBackward updates and frees a gradient at once; SequencePipeline needs it until the first slice has run backward"),
    (UNITING, "StepInBackward", "a gradient is complete when all workers have added theirs; StepInBackward moves a weight before that"),
    (UNITING, "OffloadModel", "a gradient is complete only when all workers have added theirs; OffloadModel moves a block before that"),
    # fp16 looks for overflow in all gradients of a step
    ("Precision(fp16)", "StepInBackward", f"{ALL_GRADIENTS}; StepInBackward moves them one by one"),
    ("Precision(fp16)", "OffloadModel", f"{ALL_GRADIENTS}; OffloadModel moves them block by block"),
    ("Precision(fp16)", "Shard", f"{ALL_GRADIENTS}; with Shard every worker sees a part of them"),
    ("Precision(fp16)", "Pipeline", f"{ALL_GRADIENTS}; with Pipeline every worker sees those of its stages"),
    ("Precision(fp16)", "TensorParallel", f"{ALL_GRADIENTS}; with TensorParallel every worker sees those of its parts"),
    ("Precision(fp16)", "CompressGradients", "what a message leaves out is kept at the loss scale of its step, and that scale changes"),
    ("Precision(fp16)", "LocalSteps", "between two synchronisations every worker would have a loss scale of its own"),
    *(("Precision(fp16)", one, "fp16 must look at all gradients of a step for overflow; here every worker has its own, and its own scale")
      for one in SERVED),
    # OffloadModel runs the blocks itself
    ("OffloadModel", "StepInBackward", "OffloadModel steps every weight in backward itself"),
    ("OffloadModel", "OffloadOptimizer", "OffloadModel keeps the moments on disk itself"),
    ("OffloadModel", "Checkpoint", "OffloadModel recomputes every block itself, when its weights are in memory"),
    ("OffloadModel", "SequencePipeline",
     "OffloadModel runs every block backward once in a step; with SequencePipeline it runs backward once for every slice"),
    # State on disk
    ("OffloadActivations", "SequencePipeline",
     "OffloadActivations rewrites its file in every forward; with SequencePipeline all slices run forward before any backward"),
    ("OffloadActivations", "Pipeline",
     "a file of OffloadActivations follows one forward and its backward; a pipeline has several micro-batches in flight: use Checkpoint"),
    (UNITING, "OffloadOptimizer(disk)",
     "the state on disk is one worker's; Shard divides the optimizer's state between workers instead"),
    ("TensorParallel", "OffloadOptimizer",
     "OffloadOptimizer keeps the state of whole weights, and with TensorParallel a worker has parts of them"),
    *((one, "OffloadOptimizer", "weights are stepped whenever a gradient arrives; OffloadOptimizer's file has one step after the other")
      for one in SERVED),
    # Low-rank updates stand beside whole weights
    ("LowRank", "Shard", "Shard divides weights between workers; the updates of LowRank are too small to divide: use DataParallel"),
    ("LowRank", "Pipeline", "LowRank trains updates beside the model's weights, and Pipeline only knows which stage holds the model's own"),
    ("LowRank", "TensorParallel", "LowRank trains updates beside whole weights, and with TensorParallel a worker has parts of them"),
    # Averages are of whole weights
    ("EMA", "LowRank", "EMA averages the model's weights, and LowRank trains updates beside them, which it does not know"),
    ("EMA", "OffloadModel", "EMA keeps an average of all weights in memory; OffloadModel is there because they do not fit"),
    ("EMA", "Shard(stage=3)", "EMA averages whole weights, and with Shard(stage=3) a worker has a part of them; use Shard(stage=2)"),
    ("EMA", "Pipeline", "EMA averages whole models, and with Pipeline a worker has the weights of its stages alone"),
    ("EMA", "TensorParallel", "EMA averages whole weights, and with TensorParallel a worker has parts of them"),
    *(("EMA", one, "between two synchronisations every worker has weights, and so an average, of its own")
      for one in ("LocalSteps", "CompressGradients(topk)")),
    *(("EMA", one, "weights move whenever a gradient arrives, so an average by steps would depend on who came when") for one in SERVED),
    # Masks cover whole weights, and change between updates of all of them
    *((one, other, f"{other} {why}, and {one} needs {needs}") for one in SPARSE for other, why, needs in (
        ("LowRank", "leaves the weights as they are and trains updates beside them", "weights that are trained themselves"),
        ("StepInBackward", "moves a weight as soon as its gradient is there", "all gradients before any weight moves"),
        ("OffloadModel", "has the weights on disk", "all weights in memory when masks change"),
        ("Shard", "divides weights, or gradients, between workers", "whole ones: use DataParallel"),
        ("Pipeline", "leaves a worker the weights of its stages alone", "all of them, to know the smallest"),
        ("TensorParallel", "leaves a worker parts of weights", "whole ones"),
        ("LocalSteps", "lets every worker have weights of its own between two synchronisations", "the same on all workers"),
        ("CompressGradients(topk)", "lets every worker step for itself", "the same weights on all workers"),
        *((served, "moves weights whenever a gradient arrives", "steps that all workers count alike") for served in SERVED))),
    *((one, "EMA", f"an average keeps what weights were before {one} made them zero, so what is exported would not be sparse")
      for one in SPARSE),
    *((one, "Precision(fp16)", f"{one} makes gradients of gates of all others, which fp16 has at a loss scale that may have overflowed")
      for one in GATED),
    *((one, other, "both say which weights are zero: choose one") for one, other in combinations(SPARSE, 2)),
    # Techniques that cut the model into stages
    ("SequencePipeline", "Pipeline(zero-bubble)",
     "a slice runs backward after all later ones, as a whole; zero-bubble splits the backward in two: use schedule='gpipe' or '1f1b'"),
    ("SequencePipeline", "Pipeline(pipedream)",
     "all slices of a sequence must use the same weights; pipedream moves them after every micro-batch: use schedule='gpipe' or '1f1b'"),
    ("Pipeline", "Shard(stage=3)",
     "Shard(stage=3) sends the weights of a block before every forward, and a pipeline has many of them in a step; use Shard(stage=1)"),
    ("Pipeline(pipedream)", f"{UNITING} along data",
     "copies add up the gradients of a whole batch, and pipedream has moved the weights after every micro-batch by then: give as many "
     "stages as devices, or use schedule='1f1b'"),
    ("Pipeline(pipedream)", "TensorParallel",
     "pipedream keeps versions of whole layers, and with TensorParallel a worker has parts of them: use schedule='1f1b'"),
    ("Pipeline(pipedream)", "Accumulate",
     "Accumulate adds up the gradients of micro-batches, and pipedream moves the weights after each: give it fewer pieces instead"),
    # Techniques that hold parts of weights
    ("TensorParallel", "Precision(weights)",
     "TensorParallel has parts of the weights that the model was made with, and 16-bit weights are others: leave weights= out"),
    ("TensorParallel", "Shard(stage=3)",
     "both keep parts of weights, and a checkpoint knows how to join one kind: Shard(stage=2) goes with TensorParallel"),
    *((axis, one, "the first worker keeps whole weights for all, and here each has its parts") for axis, _ in HOLDERS for one in SERVED),
    *((axis, "LocalSteps", f"what LocalSteps keeps from step to step is saved by the first worker alone, and {whose} has its own")
      for axis, whose in HOLDERS),
    *((axis, f"CompressGradients({kind})",
       f"what {kind} keeps from step to step is saved by the first worker alone, and {whose} has its own: use kind='int8'")
      for axis, whose in HOLDERS for kind in ("topk", "powersgd")),
    *((f"{UNITING} along {axis}", f"{UNITING} along {axis}", "both unite the workers: choose one") for axis in ("data", "stage", "tensor")),
)  # fmt: skip
CONFLICTS: dict[frozenset[str], str] = {frozenset({one, other}): why for one, other, why in PAIRS}

KNOWN = frozenset(name for pair in CONFLICTS for name in pair)


def clash(one: Technique[Any, Any], other: Technique[Any, Any]) -> str:
    """Why two techniques can't be combined; empty if they can."""
    return known_clash(names(one), names(other))


@lru_cache(1 << 16)  # a search asks at every step
def names(technique: Technique[Any, Any]) -> tuple[str, ...]:
    """A technique's own name, and its other names that are in the table."""
    own, *others = technique.conflict_names
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
