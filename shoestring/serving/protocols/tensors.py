"""Tensors of the Open Inference Protocol: lists in JSON, or bytes behind it.

https://github.com/kserve/open-inference-protocol (V2), and Triton's binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.serving.protocols.http.refusals import wrong
from shoestring.serving.replicas.wire import tensor_bytes

DATATYPES = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # torch's name -> the protocol's


def from_lists(data: Any, dtype: str, shape: Sequence[int], field: str) -> Tensor:
    """A tensor of nested or flat lists, whose numbers the dtype can hold."""
    if not isinstance(data, list):
        raise wrong(field, "it must be a list")
    try:
        found = np.array(data)
    except (ValueError, OverflowError):
        raise wrong(field, "its lists have different lengths, or its numbers are too large") from None
    if found.size == 0:
        raise wrong(field, "it is empty")
    if tuple(found.shape) not in (tuple(shape), (prod(shape),)):
        raise wrong(field, f"it has the shape {list(found.shape)}, and the shape says {list(shape)}")
    kinds = "b" if dtype == "bool" else "iu" if "int" in dtype else "iuf"
    if found.dtype.kind not in kinds:
        what = {"b": "true and false", "iu": "whole numbers", "iuf": "numbers"}[kinds]
        raise wrong(field, f"{DATATYPES[dtype]} needs {what}")
    kind = getattr(torch, dtype)
    if kinds == "iu":
        least, most = torch.iinfo(kind).min, torch.iinfo(kind).max
        if int(found.min()) < least or int(found.max()) > most:
            raise wrong(field, f"{DATATYPES[dtype]} holds numbers from {least} to {most}")
    tensor = torch.from_numpy(found.reshape(tuple(shape))).to(kind)
    return checked_finite(tensor, field)


def from_bytes(data: bytearray, dtype: str, shape: Sequence[int], field: str) -> Tensor:
    """A tensor of raw little-endian bytes, which it shares."""
    kind = getattr(torch, dtype)
    if len(data) != prod(shape) * kind.itemsize:
        raise wrong(
            field,
            f"{len(data)} bytes came for {DATATYPES[dtype]} {list(shape)}, which are {prod(shape) * kind.itemsize}",
        )
    if dtype == "bool" and max(data) > 1:
        raise wrong(field, "a BOOL is a byte of 0 or 1")
    return checked_finite(torch.frombuffer(data, dtype=kind).reshape(tuple(shape)), field)


def checked_finite(tensor: Tensor, field: str) -> Tensor:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise wrong(field, "it has NaN or infinity, or a number that its datatype can't hold")
    return tensor


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor_bytes(tensor))
