"""Sparse storage of pruned weights: a pruning mask, as a bitmap or a seed, and the kept numbers in another format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Self
from zlib import crc32

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import FormatTensor, Settings, Shape, WeightFormat
from shoestring.core.errors import Mistake
from shoestring.core.model.masks import lowest, seed_scores
from shoestring.numerics.bit_packing import pack_bits, packed_bytes, unpack_bits

INNER = "inner."  # prefix of the inner format's tensor names


class SparseFormat(WeightFormat):
    """The kept numbers of a pruned weight, in order, as a vector in an inner format; all other numbers are zero.

        bytes = count / 8 (the bitmap; none if the mask follows from a seed)  +  bytes of `kept` numbers in the inner format

    A bitmap is smaller than indices of b bits if more than 1/b of the numbers are kept. A random mask is drawn again
    from its seed. Its checksum is in the settings, so a mask that comes out differently raises an error instead of
    giving wrong weights.
    """

    kind = "sparse"
    mask: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype, settings: Settings, tensors: Mapping[str, Tensor]) -> None:
        nn.Module.__init__(self)  # the tensors of the inner format are buffers of a child module
        self.set_layout(shape, dtype, settings, tensors)
        if "mask" in tensors:
            self.register_buffer("mask", tensors["mask"])
            ones = -1 if self.mask.is_meta else int(unpack_bits(self.mask, 1, prod(shape)).sum())
            if ones not in (-1, int(settings["kept"])):
                raise Mistake(
                    f"the bitmap keeps {ones} of {prod(shape)} numbers, but {settings['kept']} are stored: it is damaged; "
                    "store the weight again"
                )
        inside = {name.removeprefix(INNER): tensor for name, tensor in tensors.items() if name.startswith(INNER)}
        self.inner: WeightFormat = inner_kind(settings)(
            (int(settings["kept"]),), dtype, settings["inner_settings"], inside
        )
        self.drawn: Tensor | None = None  # the bitmap drawn from a seed, cached

    @classmethod
    def layout(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> dict[str, FormatTensor]:
        count, kept = prod(shape), int(settings["kept"])
        if not 0 <= kept <= count:
            raise ValueError(f"{kept} numbers kept of {count}")
        parts = {} if "seed" in settings else {"mask": FormatTensor((packed_bytes(count, 1),), torch.uint8)}
        inside = inner_kind(settings).layout((kept,), dtype, settings["inner_settings"])
        return parts | {INNER + name: part for name, part in inside.items()}

    @classmethod
    def blank(cls, shape: Shape, dtype: torch.dtype, settings: Settings) -> Self:
        inner = partial(inner_kind(settings).blank, dtype=dtype, settings=settings["inner_settings"])
        parts = {} if "seed" in settings else {"mask": pack_bits(torch.arange(prod(shape)) < int(settings["kept"]), 1)}
        inside = inner((int(settings["kept"]),)).tensors()
        return cls(shape, dtype, settings, parts | {INNER + name: tensor for name, tensor in inside.items()})

    @classmethod
    def of(cls, weight: Tensor, inner: Callable[[Tensor], WeightFormat], mask: Tensor | None = None) -> Self:
        """Store a weight's nonzero numbers, or those that a mask keeps. `inner` packs the vector of kept numbers.

        >>> from shoestring.compression.formats.format import PlainFormat
        >>> form = SparseFormat.of(torch.tensor([0.0, 2.0, 0.0, -1.0]), PlainFormat.of)
        >>> form.dense(), form.stored_bytes
        (tensor([ 0.,  2.,  0., -1.]), 9)
        """
        where = (weight.detach() != 0 if mask is None else mask).reshape(-1).cpu()
        return cls.with_mask(weight, inner, where, {}, {"mask": pack_bits(where, 1)})

    @classmethod
    def of_seed(cls, weight: Tensor, inner: Callable[[Tensor], WeightFormat], kept: int, seed: int) -> Self:
        """Store a weight pruned with `seeded_mask(weight.shape, kept, seed)`: the mask takes no bytes."""
        where = seeded_mask(tuple(weight.shape), kept, seed).reshape(-1)
        if bool((weight.detach().reshape(-1).cpu()[~where] != 0).any()):
            raise Mistake(
                f"a weight of shape {list(weight.shape)} is not zero where the mask of seed {seed}, which keeps {kept}, is: "
                "these numbers would be lost; multiply it by the mask first, or store it with a bitmap"
            )
        return cls.with_mask(
            weight, inner, where, {"seed": seed, "checksum": crc32(pack_bits(where, 1).numpy().tobytes())}, {}
        )

    @classmethod
    def with_mask(
        cls,
        weight: Tensor,
        inner: Callable[[Tensor], WeightFormat],
        where: Tensor,
        settings: Settings,
        tensors: Mapping[str, Tensor],
    ) -> Self:
        flat = weight.detach().reshape(-1)
        form = inner(flat[where.to(flat.device)])
        settings = dict(settings) | {"kept": int(where.sum()), "inner": form.kind, "inner_settings": form.settings}
        inside = {INNER + name: value for name, value in form.tensors().items()}
        return cls(tuple(weight.shape), weight.dtype, settings, {**tensors, **inside})

    def dense(self) -> Tensor:
        count, kept = prod(self.shape), int(self.settings["kept"])
        bitmap = self.mask if "seed" not in self.settings else self.bitmap()
        empty = torch.zeros(count, dtype=self.dtype, device=bitmap.device)
        if not kept:
            return empty.view(self.shape)
        where = unpack_bits(bitmap, 1, count).to(torch.bool)
        values = self.inner.dense()
        return empty.masked_scatter_(where.to(values.device), values).view(self.shape)

    def bitmap(self) -> Tensor:
        """The mask drawn from a seed. It is drawn once and then cached (count / 8 bytes of memory, none on disk)."""
        if self.drawn is None:
            seed, kept = int(self.settings["seed"]), int(self.settings["kept"])
            drawn = pack_bits(seeded_mask(self.shape, kept, seed).reshape(-1), 1)
            if crc32(drawn.numpy().tobytes()) != int(self.settings["checksum"]):
                raise Mistake(
                    f"seed {seed} now gives another mask of {kept} numbers than the one that these weights were stored with: "
                    "the settings were changed, or masks are drawn in another way now; store the weights again"
                )
            self.drawn = drawn
        device = next((tensor.device for tensor in self.inner.buffers()), self.drawn.device)
        return self.drawn.to(device)


def seeded_mask(shape: Shape, kept: int, seed: int) -> Tensor:
    """True for exactly `kept` numbers: the mask that `core.masks.seed_mask` makes of a share and the same seed.

    >>> from shoestring.core.model.masks import seed_mask
    >>> torch.equal(seeded_mask((2, 4), 4, seed=3), seed_mask((2, 4), share=0.5, seed=3))
    True
    """
    count = prod(shape)
    if not 0 <= kept <= count:
        raise Mistake(f"{kept} of {count} numbers can't be kept: give a whole number from 0 to {count}")
    return ~lowest(seed_scores(count, seed), count - kept).view(shape)


def inner_kind(settings: Settings) -> type[WeightFormat]:
    from shoestring.compression.formats.kinds import KINDS  # which imports this file

    kind = settings["inner"]
    if kind not in KINDS or issubclass(KINDS[kind], SparseFormat):
        raise ValueError(
            f"a sparse weight has the inner format {kind!r}: there are "
            f"{', '.join(one for one in KINDS if one != SparseFormat.kind)}"
        )
    return KINDS[kind]
