"""The grid format: integers of 2 to 8 bits with a scale and a zero point per group of a row: w = scale (code - zero)."""

from __future__ import annotations

from math import prod
from typing import Self

import torch
from torch import Tensor

from shoestring.compression.formats.format import FormatTensor, Settings, Shape, WeightFormat
from shoestring.numerics.bit_packing import pack_bits, packed_bytes, unpack_bits
from shoestring.numerics.block_quantization import grid_values


class GridFormat(WeightFormat):
    """Rows (the weight's first dimension) of codes; every `group` numbers of a row share a scale (float16) and a zero
    point, which is a code.

        w = scale (code - zero)

    `transposed`: rows are those of W^T, for a weight that is multiplied as x W (its first dimension belongs to inputs).

    Zero is on every grid, so pruned weights stay zero. If the group size does not divide a row, its last group is
    shorter.
    """

    kind = "grid"
    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        bits, group = int(settings["bits"]), int(settings["group"])
        if not 2 <= bits <= 8 or group < 1 or not shape:
            raise ValueError(f"a grid of {bits} bits in groups of {group} for a weight of {list(shape)}")
        rows, columns = grid_shape(shape, settings)
        groups = -(-columns // group)
        return {
            "codes": FormatTensor((packed_bytes(rows * columns, bits),), torch.uint8),
            "scales": FormatTensor((rows, groups), torch.float16),
            "zeros": FormatTensor((packed_bytes(rows * groups, bits),), torch.uint8),
        }

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bits: int,
        group: int,
        shape: Shape,
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> Self:
        """Pack codes (rows, columns), with scales and zero points (rows, groups)."""
        stored = {
            "codes": pack_bits(codes.reshape(-1), bits),
            "scales": scales.to(torch.float16),
            "zeros": pack_bits(zeros.reshape(-1), bits),
        }
        return cls(shape, dtype, {"bits": bits, "group": group} | ({"transposed": True} if transposed else {}), stored)

    def dense(self) -> Tensor:
        rows, columns = grid_shape(self.shape, self.settings)
        bits = int(self.settings["bits"])
        codes = unpack_bits(self.codes, bits, rows * columns).view(rows, columns)
        found = self.dequantize(codes, self.scales, self.zero_points())
        return (found.T.contiguous() if self.settings.get("transposed") else found).view(self.shape)

    def rows(self, index: Tensor) -> Tensor:
        rows, columns = matrix_shape(self.shape)
        bits, wanted = int(self.settings["bits"]), index.reshape(-1)
        if columns % 8 or self.settings.get("transposed"):  # then a row may begin inside a byte
            return super().rows(index)
        codes = unpack_bits(self.codes.view(rows, -1)[wanted].reshape(-1), bits, len(wanted) * columns).view(
            len(wanted), columns
        )
        return self.dequantize(codes, self.scales[wanted], self.zero_points()[wanted]).view(
            *index.shape, *self.shape[1:]
        )

    def zero_points(self) -> Tensor:
        return unpack_bits(self.zeros, int(self.settings["bits"]), self.scales.numel()).view(self.scales.shape)

    def dequantize(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """scale (code - zero) for each group, in the weight's dtype."""
        return grid_values(codes, scales.to(self.dtype), zeros.to(self.dtype), int(self.settings["group"]))


def grid_shape(shape: Shape, settings: Settings) -> tuple[int, int]:
    """Rows and columns of the codes."""
    rows, columns = matrix_shape(shape)
    return (columns, rows) if settings.get("transposed") is True else (rows, columns)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a weight: its first dimension, and all others. A vector counts as one row.

    >>> matrix_shape((64, 3, 3, 3)), matrix_shape((10,))
    ((64, 27), (1, 10))
    """
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
