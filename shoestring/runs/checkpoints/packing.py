"""Pack state into tensors and JSON, and unpack it unchanged without running code.

Dicts keep their keys' types, tuples stay tuples, tensors keep their strides. Only numbers, text, tensors, arrays and
containers of these are accepted, because anything else could only be restored by running code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.private import dense_parts
from shoestring.core.running.run_state import StoredTensor
from shoestring.measure.process import memory_all
from shoestring.runs.weights.tensors import TensorFile


def pack(value: Any, tensors: dict[str, Tensor | StoredTensor], name: str) -> Any:
    """The value as JSON; its tensors are added to `tensors` under names that begin with `name`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if (
        isinstance(value, Tensor) and value.layout is torch.sparse_coo
    ):  # such as an optimizer's moments of sparse gradients
        tensors[f"{name}/indices"], tensors[f"{name}/values"] = dense_parts(value.detach())
        return {"sparse": name, "shape": list(value.shape), "coalesced": value.is_coalesced()}
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name} if value.is_contiguous() else {"tensor": name, "stride": list(value.stride())}
    if isinstance(value, StoredTensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, np.ndarray) and value.dtype != object:
        tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
        return {"array": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {
            "dict": [
                [pack(key, tensors, f"{name}/key"), pack(one, tensors, f"{name}/{key}")] for key, one in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(one, tensors, f"{name}/{number}") for number, one in enumerate(value)]}
    raise Mistake(
        f"{name} holds a {type(value).__name__}, which can't be saved as numbers, text and tensors: "
        f"give its owner a state_dict made of those"
    )


def with_strides(found: Tensor, strides: list[int]) -> Tensor:
    """A tensor with its original strides. Gaps between its numbers take address space, and a file may claim any amount."""
    if len(strides) != found.dim() or any(type(one) is not int or one < 0 for one in strides):
        raise ValueError(f"strides {strides} for a tensor of {list(found.shape)}")
    size = (
        1 + sum((length - 1) * one for length, one in zip(found.shape, strides, strict=True))
    ) * found.dtype.itemsize
    if found.numel() and size > memory_all():
        raise ValueError(f"strides {strides}, by which a tensor of {list(found.shape)} takes {size} bytes")
    return torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(found)


def unpack(value: Any, tensors: Mapping[str, Tensor] | TensorFile) -> Any:
    """The original value. If the tensors are on the meta device, so are arrays."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        found = tensors[value["tensor"]]
        if "stride" not in value:
            return found
        return with_strides(found, value["stride"])
    if "sparse" in value:
        indices, values = (tensors[f"{value['sparse']}/{part}"] for part in ("indices", "values"))
        return (
            values
            if values.is_meta
            else torch.sparse_coo_tensor(
                indices, values, value["shape"], check_invariants=True, is_coalesced=value["coalesced"]
            )
        )
    if "array" in value:
        found = tensors[value["array"]]
        return found if found.is_meta else found.numpy()
    if "dict" in value:
        return {unpack(key, tensors): unpack(one, tensors) for key, one in value["dict"]}
    items = [unpack(one, tensors) for one in value["tuple" if "tuple" in value else "list"]]
    return tuple(items) if "tuple" in value else items
