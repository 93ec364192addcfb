"""Vector quantization of a weight: k-means, product, optimized product, residual and additive codes.

Each row of a weight is cut into vectors x of `length` neighbouring numbers. Each vector is stored as a codebook entry,
or as a sum of several. Every number counts with m, the mean square of the activation that it is multiplied with:

    minimise   sum_x sum_j m_j (x_j - sum_s c_s[j])^2

`codebook_training.py` trains codebooks for that error, and `rotation.py` learns rotations. A rotation mixes columns, so
per-column weights can no longer be applied. With `scaled`, columns are multiplied by sqrt(m) before the rotation and a
scale per column is stored, which gives exactly the same weighted error.

Measured on all linear layers of MiniLM (damage, 1 - cosine; codebooks begun by faiss as in codebook_training.py),
weighted and unweighted: pairs with 8 bits .029 and .034 (4.03 bits a weight); two added codes for four numbers (4.11
bits): residual .027 and .051 (faiss alone .049), local search .042 and .115; for eight numbers (2.22 bits) .220;
product codebooks of 6 bits for pairs (3.22 bits) .076 and .108; rotated and scaled (3.48 bits) .107; fours with 8 bits
(2.06 bits) .231 and .376. A grid with GPTQ: .011 at 4.31, .039 at 3.30, .154 at 2.28 bits. So weighting always helps,
and a grid with GPTQ beats all of these at about the same size. Word embedding: pairs with 8 bits .0015 (4.00 bits),
product .0054 (3.03 bits; faiss alone .0049), against .0012 (4.31) and .0051 (3.30) for the grid.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.compression.formats.product import ProductFormat, ProductSizes, sizes_of
from shoestring.compression.quantization.codebook_training import METHODS, train_codebooks
from shoestring.compression.quantization.rotation import learn_rotation
from shoestring.compression.quantization.scalar_codes import broadcast_importance, matrix_to_code
from shoestring.compression.quantization.vector_codes import VectorCodes, alternate_codes_and_tables, encode
from shoestring.core.errors import Mistake

POINTS = 1 << 15  # vectors used to train one codebook


@dataclass(frozen=True)
class VectorCoding:
    """Settings of a vector code. It takes bits * stages / length bits a weight; tables hold 2^bits * stages * length *
    books numbers."""

    length: int = 4  # numbers per vector
    bits: int = 8  # per code
    stages: int = 1  # codes that are added up
    books: int = 1  # codebooks; 0: one per position in a row (product quantization)
    rotation: int = 0  # neighbouring numbers rotated together; 0: none
    scaled: bool = False  # store a scale per column, 1 / sqrt(m)
    method: str = METHODS[0]
    rounds: int = 4  # alternations between codes and tables under the weighted error

    def settings(self) -> dict[str, Any]:
        kept = asdict(self)
        return {name: kept[name] for name in ("length", "bits", "stages", "books", "rotation", "scaled")}


def fit_product_codes(
    weight: Tensor, recipe: VectorCoding, importance: Tensor | None = None, seed: int = 0
) -> ProductFormat:
    """Quantize a weight with vector codes. `importance`: weight of each number in the error, broadcast to (rows,
    columns)."""
    matrix = matrix_to_code(weight, importance)
    settings, shape = recipe.settings(), tuple(weight.shape)
    try:
        sizes = sizes_of(shape, settings)
    except ValueError as error:
        raise Mistake(f"{error}: give vectors that fill a row evenly, and a rotation of whole vectors") from None
    if recipe.method not in METHODS:
        raise Mistake(f"codebooks by {recipe.method!r}: there are {', '.join(METHODS)}")
    heavy = broadcast_importance(importance, matrix)
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
        rotation = learn_rotation(numbers.view(-1, sizes.rotation), recipe.length, recipe.bits, seed).half().float()
        numbers = (numbers.view(-1, sizes.rotation) @ rotation).view(sizes.rows, sizes.width)
        heavy = torch.full_like(numbers, float(heavy.mean()))
    found = [fit_one_codebook(numbers, heavy, sizes, book, recipe, seed) for book in range(sizes.books)]
    codes = torch.empty(sizes.rows, sizes.places, sizes.stages, dtype=torch.int64)
    for book, one in enumerate(found):
        codes[:, book :: sizes.books] = one.codes.view(sizes.rows, -1, sizes.stages)
    tables = torch.stack([one.tables for one in found])
    return ProductFormat.of(codes, tables, settings, shape, weight.dtype, rotation=rotation, scales=scales)


def column_scales(heavy: Tensor) -> Tensor:
    """1 / sqrt(m) per column, normalised to about 1 and rounded to float16; bounded where inputs are nearly zero."""
    mean = heavy.double().mean(0)
    mean = mean / mean.mean() if float(mean.mean()) > 0 else torch.ones_like(mean)
    return mean.clamp(min=1e-3).rsqrt().half().float()


def fit_one_codebook(
    numbers: Tensor, heavy: Tensor, sizes: ProductSizes, book: int, recipe: VectorCoding, seed: int
) -> VectorCodes:
    """Train one codebook, and encode the vectors that share it."""
    vectors, weights = (
        one.view(sizes.rows, sizes.places, sizes.length)[:, book :: sizes.books].reshape(-1, sizes.length)
        for one in (numbers, heavy)
    )
    sample, heavy_sample = sample_vectors(vectors, weights, seed)
    tables = train_codebooks(sample, heavy_sample, 2**recipe.bits, recipe.stages, recipe.method, seed)
    tables = alternate_codes_and_tables(sample, heavy_sample, tables, recipe.rounds)
    return VectorCodes(encode(vectors, weights, tables), tables)


def sample_vectors(vectors: Tensor, weights: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A sample of vectors, with the weights of their numbers. It includes all of the longest vectors; the others are
    drawn at random and weighted up to stand for the rest."""
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
