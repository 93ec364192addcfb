"""Scalar codebook: every weight is stored as an index into a table of values, w = scale * value[code]."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from shoestring.compression.formats.format import FormatTensor, Settings, Shape, WeightFormat
from shoestring.compression.formats.grid import matrix_shape
from shoestring.numerics.bit_packing import pack_bits, packed_bytes, unpack_bits


class CodebookFormat(WeightFormat):
    """Rows of codes into one table of 2^bits float16 values; every `group` numbers of a row share a float16 scale.

        w = scale value[code]          group 0: w = value[code], without scales

    Values may lie anywhere, denser where the weights are, which a grid can't do. A grid has a zero point per group,
    which a codebook can't do. If the group size does not divide a row, its last group is shorter.
    """

    kind = "codebook"
    codes: Tensor
    values: Tensor
    scales: Tensor

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        bits, group = int(settings["bits"]), int(settings["group"])
        if not 2 <= bits <= 8 or group < 0 or not shape:
            raise ValueError(f"a codebook of {bits} bits in groups of {group} for a weight of {list(shape)}")
        rows, columns = matrix_shape(shape)
        parts = {
            "codes": FormatTensor((packed_bytes(rows * columns, bits),), torch.uint8),
            "values": FormatTensor((2**bits,), torch.float16),
        }
        return parts | ({"scales": FormatTensor((rows, -(-columns // group)), torch.float16)} if group else {})

    @classmethod
    def of(
        cls,
        codes: Tensor,
        values: Tensor,
        scales: Tensor | None,
        bits: int,
        group: int,
        shape: Shape,
        dtype: torch.dtype,
    ) -> Self:
        """Pack codes (rows, columns), a table of 2^bits values, and scales (rows, groups) or None.

        >>> form = CodebookFormat.of(torch.tensor([[0, 3, 1]]), torch.tensor([-1.0, -0.25, 0.25, 1.0]), None, 2, 0, (3,), torch.float32)
        >>> form.dense(), form.stored_bytes
        (tensor([-1.0000,  1.0000, -0.2500]), 10)
        """
        stored = {"codes": pack_bits(codes.reshape(-1), bits), "values": values.to(torch.float16)}
        stored |= {} if scales is None else {"scales": scales.to(torch.float16)}
        return cls(shape, dtype, {"bits": bits, "group": group}, stored)

    def dense(self) -> Tensor:
        rows, columns = matrix_shape(self.shape)
        codes = unpack_bits(self.codes, int(self.settings["bits"]), rows * columns)
        return self.decode_codes(codes, rows, getattr(self, "scales", None)).view(self.shape)

    def rows(self, index: Tensor) -> Tensor:
        count, columns = matrix_shape(self.shape)
        bits, wanted = int(self.settings["bits"]), index.reshape(-1)
        if columns % 8 or len(self.shape) == 1 or not columns:  # a row may begin inside a byte
            return super().rows(index)
        codes = unpack_bits(self.codes.view(count, -1)[wanted].reshape(-1), bits, len(wanted) * columns)
        scales = self.scales[wanted] if int(self.settings["group"]) else None
        return self.decode_codes(codes, len(wanted), scales).view(*index.shape, *self.shape[1:])

    def decode_codes(self, codes: Tensor, rows: int, scales: Tensor | None) -> Tensor:
        """scale * value[code] for rows of codes, in the weight's dtype."""
        values = torch.index_select(self.values.to(self.dtype), 0, codes.to(torch.int32))
        if scales is None or not values.numel():
            return values
        return apply_scales(values.view(rows, -1), scales, int(self.settings["group"]))


def apply_scales(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """Multiply each group of each row by its scale, in place.

    >>> apply_scales(torch.ones(1, 5), torch.tensor([[2.0, 3.0]]), 4)
    tensor([[2., 2., 2., 2., 3.]])
    """
    columns, scales = values.shape[1], scales.to(values.dtype)
    group = min(group, max(columns, 1))  # the group size may exceed a row
    if columns % group == 0:
        return values.view(len(values), -1, group).mul_(scales[..., None]).view(len(values), columns)
    return values.mul_(scales.repeat_interleave(group, 1)[:, :columns])
