"""Vector, product, residual and additive quantization: one code for several neighbouring numbers of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from shoestring.compression.calibration.weight_usage import Weight
from shoestring.compression.formats.grid import matrix_shape
from shoestring.compression.formats.product import ProductFormat
from shoestring.compression.quantization.product_codes import VectorCoding, fit_product_codes
from shoestring.compression.technique import ModelCost, Storage
from shoestring.core.errors import Mistake

KINDS = {
    "vector": VectorCoding(books=1),
    "pq": VectorCoding(books=0),
    "opq": VectorCoding(books=0, rotation=1),
    "residual": VectorCoding(stages=2),
    "aq": VectorCoding(stages=2, method="additive"),
    "lsq": VectorCoding(stages=2, method="local search"),
}


@dataclass(frozen=True)
class ProductQuantize(Storage):
    """Store vectors of `length` neighbouring numbers as codes of `bits` bits into codebooks
    (`quantization/product_codes.py`): one codebook for all (vector: k-means), one per position in a row (pq: Jégou,
    Douze, Schmid 2011, doi 10.1109/TPAMI.2010.57), after a rotation (opq: Ge et al. 2013, doi 10.1109/CVPR.2013.379),
    or sums of two entries (residual; aq: additive, Babenko, Lempitsky 2014, doi 10.1109/CVPR.2014.124; lsq: additive
    with local search, Martinez et al. 2016, doi 10.1007/978-3-319-46475-6_9).

    Measured on MiniLM's linear layers (1 - cosine): 4 bits vector .029, residual .027, lsq .042; 3.2 bits pq .076, 3.5
    bits opq .107; 2 bits vector .231, residual .220, where a grid with GPTQ's rounding has .011, .039 (3 bits) and
    .154. So it is never the best choice there (benchmarks/compress/README.md, Codebooks); below two bits a number there
    is no grid, and this is the only technique.

    A weight whose tables and rotation would take more bytes than they save is left alone, and the report says so.

    Costs: time to train codebooks, and a lookup for every vector in every call.

    Not for: 3 bits a number and more, where `Quantize` damages less.
    """

    kind: str = "vector"
    length: int = 4
    bits: int = 8
    why: ClassVar[str] = "one code for several numbers: below two bits a weight"
    on_request: ClassVar[bool] = True  # slow to fit, and grids do less damage at three bits or more

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(f"ProductQuantize(kind={self.kind!r}): there are {', '.join(KINDS)}")
        if self.length < 2 or not 2 <= self.bits <= 12:
            raise Mistake(
                f"ProductQuantize(length={self.length}, bits={self.bits}): give a length of 2 or more, and 2 to 12 bits"
            )

    def only(self, cost: ModelCost) -> bool:
        return True

    def recipe(self, shape: tuple[int, int], weighted: bool) -> VectorCoding:
        """The settings for a weight with these rows and columns. `weighted`: columns have different weights in the
        error, which with a rotation needs a scale per column."""
        usual = replace(KINDS[self.kind], length=self.length, bits=self.bits)
        return replace(usual, rotation=rotation_size(shape, self.length), scaled=weighted) if usual.rotation else usual

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        if self.left_alone(cost, weight):
            return ()
        calibration, shape = cost.study, matrix_shape(weight.shape)
        importance = calibration.importance(weight) if self.weighs_columns(cost, weight) else None
        make = partial(
            fit_product_codes, calibration.values[weight.name], self.recipe(shape, importance is not None), importance
        )
        return (calibration.form(weight, f"{self.kind} {self.bits}/{self.length}", make),)

    def weighs_columns(self, cost: ModelCost, weight: Weight) -> bool:
        """Whether columns are weighted by their inputs. Vectors run along rows, so this needs columns that belong to
        inputs."""
        return cost.study.moment(weight) is not None and not cost.study.inputs_first(weight)

    def left_alone(self, cost: ModelCost, weight: Weight) -> str:
        rows, columns = matrix_shape(weight.shape)
        if not weight.is_matrix:
            return "it is not a matrix"
        if weight.name in cost.study.masks:
            return "it is pruned"
        if columns < self.length:
            return f"its rows of {columns} numbers are shorter than a vector of {self.length}"
        if rows * columns < 2**self.bits * self.length:
            return f"it has fewer vectors than a {self.bits}-bit codebook has entries"
        settings = self.recipe((rows, columns), self.weighs_columns(cost, weight)).settings()
        needed = sum(part.bytes for part in ProductFormat.layout(weight.shape, weight.dtype, settings).values())
        own = weight.count * weight.dtype.itemsize
        return f"codes, tables and rotation would take {needed:,} bytes, more than its {own:,}" if needed >= own else ""


def rotation_size(shape: tuple[int, int], length: int) -> int:
    """Neighbouring numbers of a row to rotate together: all, if the rotation is small compared with the weight; else
    the number that fills a row best.

    >>> rotation_size((1024, 64), 4), rotation_size((384, 384), 4), rotation_size((30, 50), 4)
    (64, 192, 8)
    """
    rows, columns = shape
    sizes = range(length, max(min(columns + length - 1, rows // 2), length) + 1, length)
    return min(sizes, key=lambda size: (-(-columns // size) * size > max(1.125 * columns, columns + length - 1), -size))
