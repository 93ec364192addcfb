"""The time of a matrix product on a device: full waves of tiles, each of which must also be written.

A device has `processors` that each compute one tile of the result at a time, so a product takes as many rounds
("waves") as its tiles need; the last may be nearly empty. A tile's inside runs at the device's rate; its result is then
written to memory while nothing is computed, and the next one waits for its first numbers. That is why short
inner dimensions are slow, and why a larger model reaches a higher share of the peak: the same waiting for more
computing. A product with fewer tiles than processors is split along its inner dimension (split-K), as the libraries do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

TILES = ((128, 256), (256, 128), (128, 128))  # tile sizes that run at full rate on tensor cores
SHORTEST = 256  # smallest inner dimension after a split


@dataclass(frozen=True)
class MatrixProduct:
    """`count` products of (rows x inner) with (inner x columns)."""

    rows: int
    columns: int
    inner: int
    count: int = 1

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.count

    def backward(self, shared: bool = True) -> tuple[MatrixProduct, MatrixProduct]:
        """The backward's products: for the gradient of its input, and of its weights (`shared`) or second input."""
        return MatrixProduct(self.rows, self.inner, self.columns, self.count), MatrixProduct(
            self.inner, self.columns, self.rows, self.count
        )


@dataclass(frozen=True)
class PaperDevice:
    """The properties of a device that a product's time depends on, for one precision."""

    rate: float  # operations per second
    bandwidth: float  # bytes per second of its memory
    processors: int
    start: float = 0.0  # seconds of a wave before its first products
    wide: float = 2.0  # bytes of a number that is read; results are written in 16 bits


@lru_cache(maxsize=200_000)
def product_seconds(product: MatrixProduct, device: PaperDevice) -> float:
    """Seconds with the best tile size."""
    return min(tiled_seconds(product, device, *tile) for tile in TILES)


def tiled_seconds(product: MatrixProduct, device: PaperDevice, high: int, wide: int) -> float:
    tiles = ceil(product.rows / high) * ceil(product.columns / wide) * product.count
    splits = max(1, min(device.processors // tiles, product.inner // SHORTEST))
    waves = ceil(tiles * splits / device.processors)
    computed = 2.0 * high * wide * ceil(product.inner / splits) * device.processors / device.rate
    written = high * wide * (2.0 if splits == 1 else 4.0) * device.processors / device.bandwidth
    read = (
        product.count
        * (product.rows * product.inner + product.inner * product.columns)
        * device.wide
        / device.bandwidth
    )
    return max(waves * computed, read) + waves * (written + device.start)
