"""Codebooks of vectors: k-means, product, optimized product, residual and additive quantization.

A row of a weight is cut into vectors x of neighbouring numbers, and each becomes an entry of a codebook, or a sum of several. The error
that matters weighs every number by the mean square m of the input that it is multiplied with:

    least   sum_x sum_j m_j (x_j - sum_s c_s[j])^2

`codebook_training.py` finds codebooks by that error, and `rotation.py` finds rotations. A rotation mixes columns, so that a number has no
weight of its own any more: there columns are multiplied by sqrt(m) before (`scaled`, which stores a scale a column, and turns one error
into the other exactly).

Measured on MiniLM, with codebooks that faiss had begun as in codebooks.py, all linear layers: pairs by 8 bits .029 weighted, .034 plain
(4.03 bits a number); two added codes for four numbers (4.11 bits): residual .027 and .051 (faiss alone .049), local search .042 and .115;
for eight numbers (2.22 bits) .220; product codebooks of 6 bits for pairs (3.22 bits) .076 and .108; rotated and scaled (3.48 bits) .107;
fours by 8 bits (2.06 bits) .231 and .376. The grid with GPTQ: .011 at 4.31, .039 at 3.30, .154 at 2.28 bits. So weights help everywhere,
and a grid with GPTQ is better than all of these at about the same size. Word embedding: pairs by 8 bits .0015 (4.00 bits), product .0054
(3.03 bits; faiss alone .0049), where the grid has .0012 (4.31) and .0051 (3.30).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.compression.formats.product import ProductFormat, ProductSizes, sizes_of
from shoestring.compression.quantization.codebook_training import METHODS, trained
from shoestring.compression.quantization.rotation import rotation_of
from shoestring.compression.quantization.scalar_codes import broadcast, checked
from shoestring.compression.quantization.vector_codes import VectorCodes, encoded, refined
from shoestring.core.errors import Mistake

POINTS = 1 << 15  # vectors that codebooks are trained on, of one book


@dataclass(frozen=True)
class VectorCoding:
    """How vectors are coded: bits (stages / length) a number, and tables of 2^bits stages length books numbers."""

    length: int = 4
    bits: int = 8
    stages: int = 1
    books: int = 1  # 0: one for every place of a row (product quantization)
    rotation: int = 0  # numbers that are rotated together; 0: none
    scaled: bool = False  # a scale for every column: 1 / sqrt(m)
    method: str = METHODS[0]
    rounds: int = 4  # of codes and tables in turn, by the weighted error

    def settings(self) -> dict[str, Any]:
        kept = asdict(self)
        return {name: kept[name] for name in ("length", "bits", "stages", "books", "rotation", "scaled")}


def fitted_product(
    weight: Tensor, recipe: VectorCoding, importance: Tensor | None = None, seed: int = 0
) -> ProductFormat:
    """A weight as codes of vectors. `importance`: of each number, or what can be broadcast to (rows, columns)."""
    matrix = checked(weight, importance)
    settings, shape = recipe.settings(), tuple(weight.shape)
    try:
        sizes = sizes_of(shape, settings)
    except ValueError as error:
        raise Mistake(f"{error}: give vectors that fill a row evenly, and a rotation of whole vectors") from None
    if recipe.method not in METHODS:
        raise Mistake(f"codebooks by {recipe.method!r}: there are {', '.join(METHODS)}")
    heavy = broadcast(importance, matrix)
    scales = column_scales(heavy) if recipe.scaled else None
    if scales is not None:
        matrix, heavy = matrix / scales, heavy * scales.square()
    fill = (0, sizes.width - sizes.columns)
    numbers, heavy = torch.nn.functional.pad(matrix, fill), torch.nn.functional.pad(heavy, fill)
    rotation = None
    if sizes.rotation:
        if not recipe.scaled and importance is not None and float(importance.max()) > float(importance.min()):
            raise Mistake(
                "a rotation mixes columns, and then no number has a weight of its own: give scaled=True, or no importance"
            )
        rotation = rotation_of(numbers.view(-1, sizes.rotation), recipe.length, recipe.bits, seed).half().float()
        numbers = (numbers.view(-1, sizes.rotation) @ rotation).view(sizes.rows, sizes.width)
        heavy = torch.full_like(numbers, float(heavy.mean()))
    found = [coded_book(numbers, heavy, sizes, book, recipe, seed) for book in range(sizes.books)]
    codes = torch.empty(sizes.rows, sizes.places, sizes.stages, dtype=torch.int64)
    for book, one in enumerate(found):
        codes[:, book :: sizes.books] = one.codes.view(sizes.rows, -1, sizes.stages)
    tables = torch.stack([one.tables for one in found])
    return ProductFormat.of(codes, tables, settings, shape, weight.dtype, rotation=rotation, scales=scales)


def column_scales(heavy: Tensor) -> Tensor:
    """1 / sqrt(m) of every column, about 1 on the average, as float16 has it; columns whose inputs are nearly zero have a bound."""
    mean = heavy.double().mean(0)
    mean = mean / mean.mean() if float(mean.mean()) > 0 else torch.ones_like(mean)
    return mean.clamp(min=1e-3).rsqrt().half().float()


def coded_book(
    numbers: Tensor, heavy: Tensor, sizes: ProductSizes, book: int, recipe: VectorCoding, seed: int
) -> VectorCodes:
    """Codes and tables of the vectors that share one codebook."""
    vectors, weights = (
        one.view(sizes.rows, sizes.places, sizes.length)[:, book :: sizes.books].reshape(-1, sizes.length)
        for one in (numbers, heavy)
    )
    sample, heavy_sample = sampled(vectors, weights, seed)
    tables = trained(sample, heavy_sample, 2**recipe.bits, recipe.stages, recipe.method, seed)
    tables = refined(sample, heavy_sample, tables, recipe.rounds)
    return VectorCodes(encoded(vectors, weights, tables), tables)


def sampled(vectors: Tensor, weights: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Some vectors and the weights of their numbers. The longest ones are all among them, and the others stand for as many as they were
    drawn from."""
    if len(vectors) <= POINTS:
        return vectors.contiguous(), weights.contiguous()
    longest = (weights * vectors.square()).sum(1).topk(POINTS // 8).indices
    others = torch.ones(len(vectors), dtype=torch.bool)
    others[longest] = False
    rest = others.nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[: POINTS - len(longest)]]
    return vectors[torch.cat((longest, drawn))], torch.cat(
        (weights[longest], weights[drawn] * (len(rest) / len(drawn)))
    )
