"""Fingerprints: tell whether a recomputed tensor has the same bits as before, without keeping the first one.

On the CPU a fingerprint is a hash of the tensor's bytes, read in place: no torch operation runs and no tensor is made,
so memory use is unchanged. On a GPU, kernels may sum in another order each time, so a few numbers are kept and compared
with a tolerance; and because that needs a synchronisation, it is not done in every step.
"""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from shoestring.core.private import FakeTensor

Fingerprint = bytes | Tensor | None  # None: nothing comparable

SAMPLE = 64  # numbers sampled where hashing everything would take too long
CLOSE = 1e-2  # relative tolerance on a GPU, for another order of summation


def fingerprint(tensor: Tensor, sampled: bool = False) -> Fingerprint:
    """The fingerprint of a tensor; `sampled`: of a few of its numbers only."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    if (
        tensor.dtype is torch.uint8 and tensor.dim() == 1
    ):  # a library's workspace (LSTM), parts of which are never written
        return None
    if tensor.device.type != "cpu":
        if sampled:
            return None
        flat = tensor.detach().reshape(-1)
        kept = flat[:: max(flat.numel() // SAMPLE, 1)]
        return torch.view_as_real(kept).double().cpu() if kept.is_complex() else kept.double().cpu()
    return xxh3_64(memory(tensor, sampled)).digest()


def matches(before: Fingerprint, tensor: Tensor, sampled: bool = False) -> bool:
    """Whether a tensor has this fingerprint."""
    now = None if before is None else fingerprint(tensor, sampled)
    if before is None or now is None:
        return True
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and torch.allclose(
            before, now, CLOSE, CLOSE * float(before.abs().nan_to_num().amax()), True
        )
    return now == before


def memory(tensor: Tensor, sampled: bool) -> bytes | ctypes.Array[ctypes.c_ubyte]:
    """The bytes of a tensor in the order of its memory; an expanded number is read once."""
    size = tensor.element_size()
    sides = [
        (1 if stride == 0 else side, stride * size) for side, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    if not tensor.numel():
        return b""
    span = sum((side - 1) * stride for side, stride in sides) + size
    area = (ctypes.c_ubyte * span).from_address(tensor.data_ptr())
    count = prod(side for side, _ in sides)
    if span == count * size and not (sampled and count > SAMPLE):  # no gaps; the order is the same each time
        return area
    numbers = np.ndarray(
        [side for side, _ in sides],
        np.dtype((np.void, size)),
        memoryview(area),
        strides=[stride for _, stride in sides],
    )
    if sampled and count > SAMPLE:
        return numbers[np.unravel_index(np.arange(0, count, count // SAMPLE), numbers.shape)].tobytes()
    return numbers.tobytes()
