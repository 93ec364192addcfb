"""The list of compression techniques. To add one, write a file and add a line here."""

from __future__ import annotations

from shoestring.compression.technique import CompressTechnique
from shoestring.compression.techniques.cascade import Cascade
from shoestring.compression.techniques.codebook import Codebook
from shoestring.compression.techniques.decode import Decode
from shoestring.compression.techniques.early_exit import EarlyExit
from shoestring.compression.techniques.factorize import Factorize
from shoestring.compression.techniques.half import Half
from shoestring.compression.techniques.int8 import Int8
from shoestring.compression.techniques.product_quantize import ProductQuantize
from shoestring.compression.techniques.prune import Prune
from shoestring.compression.techniques.quantize import Quantize
from shoestring.compression.techniques.sparsify import Sparsify

CATALOGUE: tuple[type[CompressTechnique], ...] = (
    Prune,
    Factorize,
    EarlyExit,
    Cascade,
    Sparsify,
    Half,
    Quantize,
    Int8,
    Codebook,
    ProductQuantize,
    Decode,
)
CLASHES: dict[frozenset[type[CompressTechnique]], str] = {
    frozenset(
        (EarlyExit, Cascade)
    ): "both decide where samples leave: a cascade of a model with exits was not tried, so leave one out",
    frozenset(
        (Int8, Decode)
    ): "Int8 multiplies whole numbers, and Decode makes ordinary weights of them: leave one out",
    frozenset(
        (Int8, Sparsify)
    ): "Int8 multiplies all numbers of a weight and stores them, zeros too: use Quantize with Sparsify",
    frozenset(
        (ProductQuantize, Sparsify)
    ): "ProductQuantize codes several numbers at once, zeros too: use Quantize with Sparsify",
}


def clash(one: CompressTechnique, other: CompressTechnique) -> str:
    """Why two techniques can't be combined; empty if they can."""
    if type(one) is type(other):
        return f"{type(one).__name__} twice: choose one of its settings"
    return CLASHES.get(frozenset((type(one), type(other))), "")
