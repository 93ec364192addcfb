"""Neighbouring numbers of a row as one code: vector, product, residual and additive quantization."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from shoestring.compression.forms.grid import matrix_shape
from shoestring.compression.products import Recipe, fitted_product
from shoestring.compression.technique import ModelCost, Storage
from shoestring.compression.weights import Weight
from shoestring.core.errors import Mistake
from shoestring.core.extras import MissingExtra

KINDS = {"vector": Recipe(books=1), "pq": Recipe(books=0), "opq": Recipe(books=0, rotation=1), "residual": Recipe(stages=2),
         "lsq": Recipe(stages=2, method="local search")}


@dataclass(frozen=True)
class ProductQuantize(Storage):
    """Vectors of `length` neighbouring numbers as codes of `bits` bits into codebooks that faiss finds (`products.py`): one for all (vector
    k-means), one for every place of a row (pq: Jégou, Douze, Schmid 2011, doi 10.1109/TPAMI.2010.57), after a rotation (opq: Ge et al.
    2013,
    doi 10.1109/CVPR.2013.379), sums of two entries (residual; lsq: Martinez et al. 2018, "LSQ++").

    Measured on MiniLM's linear layers (1 - cosine): 4 bits vector .029, residual .027, lsq .042; 3.2 bits pq .076, 3.5 bits opq .107;
    2 bits vector .231, residual .220, where a grid with GPTQ's rounding has .011, .039 and .154.

    A weight whose table would be larger than what it saves stays as it is. Loading needs no faiss.
    """

    kind: str = "vector"
    length: int = 4
    bits: int = 8
    why: ClassVar[str] = "a code for several numbers: below two bits a number"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(f"ProductQuantize(kind={self.kind!r}): there are {', '.join(KINDS)}")
        if self.length < 2 or not 2 <= self.bits <= 12:
            raise Mistake(f"ProductQuantize(length={self.length}, bits={self.bits}): give vectors of 2 numbers or more, and 2 to 12 bits")

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[ProductQuantize, ...]:
        return ()   # for who asks: slow to fit, and at three bits or more grids damage less

    def only(self, cost: ModelCost) -> bool:
        return True

    def recipe(self, columns: int) -> Recipe:
        from dataclasses import replace

        usual = KINDS[self.kind]
        return replace(usual, length=self.length, bits=self.bits, rotation=columns - columns % self.length if usual.rotation else 0)

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        study, (rows, columns) = cost.study, matrix_shape(weight.shape)
        if not weight.is_matrix or weight.name in study.masks or columns < self.length or rows * columns < 2 ** self.bits * self.length:
            return ()
        importance = study.importance(weight)
        label = f"{self.kind} {self.bits}/{self.length}"
        try:
            study.form(weight, label, partial(fitted_product, study.values[weight.name], self.recipe(columns), importance))
        except MissingExtra:
            raise
        except Mistake:
            return ()   # rows that are no whole number of vectors
        saves = study.ways[weight.name, label].stored
        return (label,) if sum(part.bytes for part in saves.parts().values()) < weight.count * weight.dtype.itemsize else ()
