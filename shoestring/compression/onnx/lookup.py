"""Embedding lookups in ONNX files. torch refuses an index below 0; ONNX's Gather counts it from the end, and would answer
as to another word.
"""

from __future__ import annotations

from typing import Any

from onnxscript import opset21

op: Any = opset21  # its operators are typed for single tensor types, not for any of them


def embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """`torch.nn.functional.embedding` for torch's exporter: an index below 0 becomes one that Gather refuses. The number
    of rows is a constant: the graph may store the weight in another form."""
    zero = op.CastLike(op.Constant(value_int=0), indices)
    beyond = op.CastLike(op.Constant(value_int=int(weight.shape[0])), indices)
    return op.Gather(weight, op.Where(op.Less(indices, zero), beyond, indices), axis=0)
