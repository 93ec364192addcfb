"""Product and additive quantization: several neighbouring numbers are stored as indices of vectors that are added
up."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from shoestring.compression.formats.format import FormatTensor, Settings, Shape, WeightFormat
from shoestring.compression.formats.grid import matrix_shape
from shoestring.numerics.bit_packing import EIGHT, pack_bits, packed_bytes, unpack_bits

MOST_BITS = 12


class ProductSizes(NamedTuple):
    """Sizes derived from a weight's shape and the format's settings."""

    rows: int
    columns: int
    places: int  # vectors per row; the last one is padded
    books: int  # codebooks
    stages: int  # codes that are added up
    length: int  # numbers per vector
    bits: int  # per code
    rotation: int  # neighbouring numbers rotated together; 0: none

    @property
    def codes(self) -> int:
        return self.rows * self.places * self.stages

    @property
    def width(self) -> int:
        """Columns including padding."""
        return self.places * self.length


def sizes_of(shape: Shape, settings: Settings) -> ProductSizes:
    """Check the settings and derive sizes. Rows are padded to whole vectors and whole rotations; books 0: one codebook
    per position in a row."""
    length, bits, stages, rotation = (int(settings[name]) for name in ("length", "bits", "stages", "rotation"))
    if length < 1 or not 2 <= bits <= MOST_BITS or stages < 1 or rotation < 0 or rotation % length or not shape:
        raise ValueError(
            f"{stages} codes of {bits} bits for {length} numbers, rotated by {rotation}, for a weight of {list(shape)}"
        )
    rows, columns = matrix_shape(shape)
    together = rotation or length
    places = -(-columns // together) * (together // length)
    books = int(settings["books"]) or max(places, 1)
    if books < 1 or places % books:
        raise ValueError(f"{books} codebooks for {places} vectors of a row")
    return ProductSizes(rows, columns, places, books, stages, length, bits, rotation)


class ProductFormat(WeightFormat):
    """Each run of `length` neighbouring numbers of a row is a sum of `stages` codebook entries, each indexed by a code
    of `bits` bits.

        v[p] = sum_s table[p mod books, s, code[p, s]]     p: position of the vector in its row
        w[j] = scale[j] (v R^T)[j]                         R: orthogonal, on runs of `rotation` numbers; both are optional

    books 1: one codebook for all positions (vector quantization). One per position: product quantization (Jégou, Douze,
    Schmid 2011, Product Quantization for Nearest Neighbor Search, doi 10.1109/TPAMI.2010.57). With R: optimized product
    quantization (Ge, He, Ke, Sun 2013, Optimized Product Quantization, doi 10.1109/CVPR.2013.379). stages > 1: residual
    or additive quantization (Martinez, Zakhmi, Hoos, Little 2018, LSQ++, doi 10.1007/978-3-030-01270-0_30).

    Tables, scales and R are float16. Codes of more than 8 bits are stored as two streams.
    """

    kind = "product"
    codes: Tensor
    high: Tensor
    tables: Tensor
    rotation: Tensor
    scales: Tensor

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        sizes = sizes_of(shape, settings)
        parts = {
            "codes": FormatTensor((packed_bytes(sizes.codes, min(sizes.bits, EIGHT)),), torch.uint8),
            "tables": FormatTensor((sizes.books, sizes.stages, 2**sizes.bits, sizes.length), torch.float16),
        }
        if sizes.bits > EIGHT:
            parts["high"] = FormatTensor((packed_bytes(sizes.codes, sizes.bits - EIGHT),), torch.uint8)
        if sizes.rotation:
            parts["rotation"] = FormatTensor((sizes.rotation, sizes.rotation), torch.float16)
        if settings["scaled"]:
            parts["scales"] = FormatTensor((sizes.columns,), torch.float16)
        return parts

    @classmethod
    def of(
        cls,
        codes: Tensor,
        tables: Tensor,
        settings: Settings,
        shape: Shape,
        dtype: torch.dtype,
        *,
        rotation: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Self:
        """Pack codes (rows, places, stages) and tables (books, stages, 2^bits, length)."""
        bits = int(settings["bits"])
        low = codes.reshape(-1).to(torch.int64)
        stored = {
            "codes": pack_bits(low & 255 if bits > EIGHT else low, min(bits, EIGHT)),
            "tables": tables.to(torch.float16),
        }
        if bits > EIGHT:
            stored["high"] = pack_bits(low >> EIGHT, bits - EIGHT)
        stored |= {} if rotation is None else {"rotation": rotation.to(torch.float16)}
        stored |= {} if scales is None else {"scales": scales.to(torch.float16)}
        return cls(shape, dtype, settings, stored)

    def dense(self) -> Tensor:
        sizes = sizes_of(self.shape, self.settings)
        return self.decode_codes(self.all_codes(sizes), sizes).view(self.shape)

    def rows(self, index: Tensor) -> Tensor:
        sizes, wanted = sizes_of(self.shape, self.settings), index.reshape(-1)
        each = sizes.places * sizes.stages
        if each % EIGHT or len(self.shape) == 1 or not each:  # a row may begin inside a byte
            return super().rows(index)
        codes = unpack_bits(
            self.codes.view(sizes.rows, -1)[wanted].reshape(-1), min(sizes.bits, EIGHT), len(wanted) * each
        ).to(torch.int64)
        if sizes.bits > EIGHT:
            high = unpack_bits(
                self.high.view(sizes.rows, -1)[wanted].reshape(-1), sizes.bits - EIGHT, len(wanted) * each
            )
            codes = codes | high.to(torch.int64) << EIGHT
        return self.decode_codes(codes, sizes._replace(rows=len(wanted))).view(*index.shape, *self.shape[1:])

    def all_codes(self, sizes: ProductSizes) -> Tensor:
        codes = unpack_bits(self.codes, min(sizes.bits, EIGHT), sizes.codes).to(torch.int64)
        return (
            codes | unpack_bits(self.high, sizes.bits - EIGHT, sizes.codes).to(torch.int64) << EIGHT
            if sizes.bits > EIGHT
            else codes
        )

    def decode_codes(self, codes: Tensor, sizes: ProductSizes) -> Tensor:
        """The weights (rows, columns) for the codes of some rows."""
        vectors = sum_codebook_entries(codes.view(sizes.rows, sizes.places, sizes.stages), self.tables.to(self.dtype))
        values = vectors.view(sizes.rows, sizes.width)
        if sizes.rotation:
            values = (values.view(-1, sizes.rotation) @ self.rotation.to(self.dtype).T).view(sizes.rows, sizes.width)
        values = values[:, : sizes.columns]
        return values * self.scales.to(self.dtype) if self.settings["scaled"] else values.contiguous()


def sum_codebook_entries(codes: Tensor, tables: Tensor) -> Tensor:
    """Sum the codebook entries over stages: codes (rows, places, stages) -> vectors (rows, places, length)."""
    books, stages, entries, length = tables.shape
    rows, places = codes.shape[:2]
    first = torch.arange(places, device=codes.device) % books * (stages * entries)  # offset of each place's codebook
    flat, total = tables.reshape(-1, length), torch.zeros(0, dtype=tables.dtype)
    for stage in range(stages):
        found = torch.index_select(flat, 0, (codes[..., stage] + first + stage * entries).reshape(-1))
        total = found if stage == 0 else total.add_(found)
    return total.view(rows, places, length)
