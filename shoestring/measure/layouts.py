"""The memory layout of real kernels' results, where torch's meta functions say otherwise.

A result's layout decides whether a later `reshape` copies, a result may keep more memory than it shows, and a backward
may compute other gradients than those requested. The lists were found by running operations on real and on fake tensors
in all layouts, and with every choice of gradients (tests/measure/test_fake.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoestring.core.private import SOFTMAX_BACKWARDS, TRAINING_BATCH_NORMS, is_onednn_convolution, memory_format

aten = torch.ops.aten

# The first result is contiguous, whatever the layout of the inputs
PLAIN = SOFTMAX_BACKWARDS | {
    aten.native_layer_norm_backward.default,
    aten.mse_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.glu_backward.default,
}
# The first result is channels-last if this argument is, and contiguous otherwise
CHANNELS = dict.fromkeys(TRAINING_BATCH_NORMS, 0) | {
    aten.native_batch_norm.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.channel_shuffle.default: 0,
    aten.roll.default: 0,
    aten.reflection_pad2d_backward.default: 1,
    aten.replication_pad2d_backward.default: 1,
    aten.reflection_pad3d_backward.default: 1,
    aten.replication_pad3d_backward.default: 1,
}
# The result has the layout that adding these arguments would give
SUMS = {
    aten.elu_backward.default: (0, 5),
    aten.softplus_backward.default: (0, 1),
    aten.div.Tensor_mode: (0, 1),
    aten.floor_divide.default: (0, 1),
    aten.xlogy.Tensor: (0, 1),
    aten.copysign.Tensor: (0, 1),
    aten.binary_cross_entropy.default: (0,),
    aten.binary_cross_entropy_backward.default: (1,),
}
# The result is allocated as large as the first so many arguments (broadcast), and keeps that memory
LARGER = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 2,
    aten.col2im.default: 1,
}
# Backwards that compute other gradients than their meta functions, if only some of (input, weight, bias) are requested.
# The number is the position of the argument that says which
MASKED = {
    aten.native_batch_norm_backward.default: 9,
    aten.batch_norm_backward.default: 9,
    aten.convolution_backward.default: 10,
}
WRONG = PLAIN | set(CHANNELS) | set(SUMS) | set(LARGER) | set(MASKED)


def correct_layout(func: Any, out: Any, args: Any) -> Any:
    """The fake results of an operation, with the layout of the real ones."""
    if func in LARGER:
        room = torch.broadcast_shapes(*(one.shape for one in args[: LARGER[func]])).numel()
        if room > out.numel():
            return out.new_empty(room).as_strided(out.shape, out.stride())
    if func in MASKED:
        out = mask_gradients(func, out, args)
    first = out if isinstance(out, Tensor) else out[0]
    if first is None or first.device.type != "cpu":
        return out
    if func in PLAIN:
        return with_format(out, first, torch.contiguous_format)
    if func in CHANNELS:
        return with_format(out, first, memory_format(args[CHANNELS[func]]))
    if func in SUMS:
        alike = sum(args[number] for number in SUMS[func])
        return torch.empty_like(alike, dtype=first.dtype) if alike.shape == first.shape else out
    return out


def mask_gradients(func: Any, out: Any, args: Any) -> Any:
    """Batch norm leaves out its input's gradient if it is not requested; oneDNN computes a weight's gradient with its
    bias's."""
    asked = args[MASKED[func]]
    if func is not aten.convolution_backward.default:
        return out if asked[0] else (None, *out[1:])
    if asked[1] or not asked[2] or not is_onednn_convolution(*args[1:3], None, *args[4:10], args[3]):
        return out
    return out[0], torch.empty_like(args[2]), out[2]


def with_format(out: Any, first: Tensor, form: torch.memory_format) -> Any:
    straight = first if first.is_contiguous(memory_format=form) else torch.empty_like(first, memory_format=form)
    return straight if isinstance(out, Tensor) else (straight, *out[1:])
