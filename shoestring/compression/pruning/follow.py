"""Axes followed through the record of a forward: which dimensions of which weights are one, who reads them, and which can't be cut.

An operation that is not in the tables freezes the axes of everything it is given: what can't be followed is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shoestring.compression.pruning.axes import Dim, freeze, fresh
from shoestring.compression.pruning.known import Known, TracedForward, unfollowed
from shoestring.compression.pruning.record import RecordedCall, recorded
from shoestring.compression.pruning.rules import RULES, broadcast, made


def followed(model: nn.Module, example: Callable[[nn.Module], Any]) -> TracedForward:
    """Run a model once and follow its axes."""
    found = TracedForward()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.weights[name] = found.known[id(tensor)] = Known(
            [fresh(size) for size in tensor.shape], frozenset({name}), False
        )
    calls, outputs = recorded(model, example)
    for call in calls:
        rule = RULES.get(call.name) or (broadcast if torch.Tag.pointwise in call.func.tags else None)
        if rule is None:
            rule = unfollowed if call.inputs else made
        note(found, call, rule(found, call))
    for tensor in outputs:
        freeze((axis for dim in found.dims(tensor) for axis in dim), "it is a dimension of the model's output")
    return found


def note(found: TracedForward, call: RecordedCall, dims: Sequence[Sequence[Dim]]) -> None:
    given = [found.of(tensor) for tensor in call.inputs]
    data = not given or any(one.data for one in given)  # what a forward makes by itself is no weight
    weights = frozenset() if data else frozenset(name for one in given for name in one.weights)
    for tensor, its in zip(call.outputs, dims, strict=False):
        if any(tensor is one for one in call.inputs):
            found.of(tensor).data |= data  # written in place
        else:
            found.known[id(tensor)] = Known(list(its), weights, data)
