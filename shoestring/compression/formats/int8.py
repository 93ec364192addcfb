"""Int8 linear layers: weights and activations are both quantized to 8 bits and multiplied as integers."""

from __future__ import annotations

from functools import cache
from itertools import product as pairs
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from shoestring.compression.formats.format import FormatTensor, Settings, Shape, WeightFormat
from shoestring.compression.formats.grid import GridFormat
from shoestring.core.private import int8_product, without_modes
from shoestring.measure.instructions import deadly

INPUTS = ("token", "calibrated")
TOP = 127  # largest int8
MIDDLE = 128  # codes 0 to 255 are stored as -128 to 127
TINY = 1e-30  # scale of all-zero inputs


class Int8Format(WeightFormat):
    """Weight of a linear layer with a scale and a zero point per row (per output channel).

        w = s (c - z),    x ~ t q    ->    y_j = t s_j (sum_k q_k c_jk - z_j sum_k q_k) + bias_j

    inputs   "token": dynamic quantization, a scale t per token from its largest absolute value; "calibrated": static
             quantization, one scale for all inputs, which clips larger ones

    The integer part in brackets is exact. CPUs without a fast int8 product, or with a broken one, get the same numbers
    more slowly.
    """

    kind = "int8"
    keeps_inputs = False
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    input: Tensor

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        if len(shape) != 2 or dtype is not torch.float32 or settings["inputs"] not in INPUTS:
            raise ValueError(f"int8 with a scale by {settings['inputs']} for a weight of {list(shape)} and {dtype}")
        parts = {
            "codes": FormatTensor(shape, torch.int8),
            "scales": FormatTensor(shape[:1], torch.float16),
            "zeros": FormatTensor(shape[:1], torch.int8),
        }
        return parts | ({"input": FormatTensor((1,), torch.float32)} if settings["inputs"] == "calibrated" else {})

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, zeros: Tensor, largest: float | None = None) -> Self:
        """Pack codes from 0 to 255 (rows, columns), with scales and zero points (rows, 1). `largest`: largest absolute
        input, for one calibrated scale."""
        stored = {"codes": to_int8(codes), "scales": scales[:, 0].to(torch.float16), "zeros": to_int8(zeros[:, 0])}
        if largest is not None:
            stored["input"] = torch.tensor([max(largest / TOP, TINY)])
        return cls(tuple(codes.shape), torch.float32, {"inputs": "token" if largest is None else "calibrated"}, stored)

    @classmethod
    def blank(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> Self:
        return cls.of(
            torch.zeros(shape),
            torch.zeros(shape[0], 1),
            torch.zeros(shape[0], 1),
            None if settings["inputs"] == "token" else 1.0,
        )

    def dense(self) -> Tensor:
        return (self.codes.float() - self.zeros.float()[:, None]) * self.scales.float()[:, None]

    def rows(self, index: Tensor) -> Tensor:
        return (self.codes[index].float() - self.zeros[index].float()[..., None]) * self.scales[index].float()[
            ..., None
        ]

    def as_grid(self) -> GridFormat:
        """The same weight as a grid, for runtimes that multiply in another way."""
        wide = [(one.to(torch.int16) + MIDDLE).to(torch.uint8) for one in (self.codes, self.zeros[:, None])]
        return GridFormat.of(wide[0], self.scales[:, None], wide[1], 8, self.shape[1], self.shape, self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():  # straight-through gradient
            plain = functional.linear(x, self.dense(), bias)
            return plain + (self.linear(x.detach(), bias) - plain).detach()
        flat = x.reshape(-1, self.shape[1]).float()
        calibrated = self.settings["inputs"] == "calibrated"
        scale = self.input if calibrated else flat.abs().amax(1, keepdim=True).div_(TOP).clamp_(min=TINY)
        rounded = (flat / scale).round_()
        if calibrated:
            rounded.clamp_(-TOP, TOP)
            scale = scale + 0 * flat.sum(
                1, keepdim=True
            )  # inputs that are not finite give NaN instead of being clipped
        codes = rounded.to(torch.int8)
        sums = int8_matmul(codes, self.codes) - codes.sum(1, dtype=torch.int32)[:, None] * self.zeros
        found = sums.float().mul_(self.scales.float()).mul_(scale)
        if bias is not None:
            found += bias
        return found.to(x.dtype).view(*x.shape[:-1], self.shape[0])


def to_int8(codes: Tensor) -> Tensor:
    return (codes.to(torch.int16) - MIDDLE).to(torch.int8)


def int8_matmul(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of int8 matrices, exact, as int32."""
    few = left.is_cuda and (len(left) <= 16 or left.shape[1] % 8 or len(right) % 8)  # not supported by CUDA
    if not few and (left.is_cuda or (not deadly("int8") and sums_are_exact())):
        found: Tensor = int8_product(left, right.t())
        return found
    return (left.double() @ right.double().t()).to(torch.int32)  # exact: float64 holds integers of 53 bits


@cache
def sums_are_exact() -> bool:
    """Whether this CPU's int8 product is exact. Without VNNI instructions oneDNN accumulates pairs of products in 16
    bits and saturates silently."""
    largest = [torch.full((8, 64), byte, dtype=torch.int8) for byte in (TOP, -MIDDLE)]
    with without_modes():  # a rehearsal's dispatch mode may be active
        return all(
            torch.equal(int8_product(left, right.t()).double(), left.double() @ right.double().t())
            for left, right in pairs(largest, repeat=2)
        )
