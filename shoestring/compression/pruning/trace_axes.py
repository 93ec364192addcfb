"""Trace axes through a recorded forward pass: which dimensions of weights belong together, which weights read them, and
which can't be pruned.

An operator without a rule freezes the axes of all its inputs, so what can't be traced is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shoestring.compression.pruning.axes import Dim, freeze, new_dim
from shoestring.compression.pruning.record import RecordedCall, record_forward
from shoestring.compression.pruning.rules import RULES, constant_rule, elementwise_rule
from shoestring.compression.pruning.traced_forward import Known, TracedForward, freeze_unknown


def trace_axes(model: nn.Module, example: Callable[[nn.Module], Any]) -> TracedForward:
    """Run a model once and trace its axes."""
    found = TracedForward()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.weights[name] = found.known[id(tensor)] = Known(
            [new_dim(size) for size in tensor.shape], frozenset({name}), False
        )
    calls, outputs = record_forward(model, example)
    for call in calls:
        rule = RULES.get(call.name) or (elementwise_rule if torch.Tag.pointwise in call.func.tags else None)
        if rule is None:
            rule = freeze_unknown if call.inputs else constant_rule
        note(found, call, rule(found, call))
    for tensor in outputs:
        freeze((axis for dim in found.dims(tensor) for axis in dim), "it is a dimension of the model's output")
    return found


def note(found: TracedForward, call: RecordedCall, dims: Sequence[Sequence[Dim]]) -> None:
    given = [found.of(tensor) for tensor in call.inputs]
    data = not given or any(one.data for one in given)  # a constant created in the forward pass is not a weight
    weights = frozenset() if data else frozenset(name for one in given for name in one.weights)
    for tensor, its in zip(call.outputs, dims, strict=False):
        if any(tensor is one for one in call.inputs):
            found.of(tensor).data |= data  # written in place
        else:
            found.known[id(tensor)] = Known(list(its), weights, data)
