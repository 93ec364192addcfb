"""Make the sequence length a dynamic axis if torch's tracer fixed it although the graph works for any length.

While tracing, torch runs an LSTM or GRU step by step, and so takes the number of steps for a constant; the exported
operator works for any number. Such an axis is made dynamic if the file then agrees with the model for other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake

Shapes = Mapping[str, tuple[int, ...]]  # of outputs, by name
LENGTH = 1  # axis of an input
NO_AXIS, BATCH_AXIS, EVERY_AXIS = 0, 1, 3  # dynamic are the axes of inputs below this number


class OtherSizes(Mistake):
    """The file and the model agree on a batch, but not on one of other sizes, which the file's axes allow."""


def with_dynamic_lengths(
    graph: Any, fixed: Mapping[str, int], shorter: Shapes | None, agrees: Callable[[Any], bool]
) -> Any:
    """The graph with dynamic lengths for these inputs, or unchanged. `fixed`: length by input; `shorter`: shapes of the
    model's outputs for sequences shorter by one, None if the model refuses them; `agrees`: runs both."""
    if not fixed or shorter is None:
        return graph
    symbols = {size: f"length_of_{size}" for size in fixed.values()}
    changed = type(graph)()
    changed.CopyFrom(graph)
    for one in changed.graph.input:
        if one.name in fixed:
            one.type.tensor_type.shape.dim[LENGTH].dim_param = symbols[fixed[one.name]]
    for one in changed.graph.output:
        for size, found in zip(one.type.tensor_type.shape.dim, shorter.get(one.name, ()), strict=False):
            if not size.dim_param and size.dim_value != found:
                size.dim_param = symbols.get(size.dim_value, f"{one.name}_length")
    return changed if agrees(changed) else graph


def shorter_by_one(tensors: Mapping[str, Tensor], fixed: Mapping[str, int]) -> list[Tensor]:
    return [one[:, :-1].contiguous() if name in fixed else one for name, one in tensors.items()]


def twice_as_long(tensors: Mapping[str, Tensor], fixed: Mapping[str, int]) -> list[Tensor]:
    return [torch.cat([one, one], LENGTH) if name in fixed else one for name, one in tensors.items()]


def answer_shapes(call: Callable[[Batch], Mapping[str, Tensor]], batch: Batch) -> Shapes | None:
    """Shapes of a model's outputs for a batch; None if it refuses the batch."""
    try:
        with torch.no_grad():
            return {name: tuple(one.shape) for name, one in call(batch).items()}
    except Exception:  # raised by the model: it may have a parameter for every position
        return None


def runs_alike(difference: Callable[[], float], tolerance: float) -> bool:
    """Whether a comparison succeeds, with a small enough difference."""
    try:
        return difference() <= tolerance
    except Mistake:  # onnxruntime can't run it, or shapes differ
        return False
