"""Random numbers of which a promise of privacy depends: noise, and who takes part.

    SystemRandomness    of the operating system's generator (os.urandom: ChaCha20, keyed by the kernel). No seed, no state to find in a
                        checkpoint, never the same number twice: what was drawn once can't be drawn again, by us or by anybody else
    SeededRandomness    follows from a seed, for tests. Whoever knows the seed subtracts the noise: **not private**, and said so
                        wherever the run is told of

All other draws of a federation (batches, held-out records, codecs, simulated behaviour) follow from the job's seed (`seeds`), which is no
secret: no promise depends on them.

Gaussians are Box and Muller's, in 64 bits from 53-bit uniforms, so they end at 8.6 deviations (a chance of 5e-18 is missing). Numbers of
floating point are not real numbers: which low bits a noisy sum can have depends on the exact sum, and gives it away (Mironov 2012, On
Significance of the Least Significant Bits for Differential Privacy, CCS). So `with_noise` adds in 64 bits and rounds to a grid that
depends on the deviation alone, 2^-20 of it: every sum is a point of the same grid, and rounding afterwards costs no privacy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import floor, log2, pi
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shoestring.federated.seeds import generator_of

BITS = 53  # of a uniform number
AT_ONCE = 1 << 21  # numbers that are asked of the operating system at once
GRID = 20  # a noisy number is a multiple of 2^-20 of its noise's deviation, or of up to twice that


class Randomness(Protocol):
    """`words`: what the numbers are for. Seeded ones follow from them, as those of `generator_of`."""

    secret: ClassVar[bool]

    def uniforms(self, count: int, *words: object) -> Tensor: ...  # (count) float64, above 0 and below 1


@dataclass(frozen=True)
class SystemRandomness:
    secret: ClassVar[bool] = True

    def uniforms(self, count: int, *words: object) -> Tensor:
        parts = [min(AT_ONCE, count - begin) for begin in range(0, count, AT_ONCE)]
        return (
            torch.cat([uniform(os.urandom(8 * part)) for part in parts])
            if parts
            else torch.zeros(0, dtype=torch.float64)
        )


@dataclass(frozen=True)
class SeededRandomness:
    seed: int
    secret: ClassVar[bool] = False

    def uniforms(self, count: int, *words: object) -> Tensor:
        drawn = torch.randint(1 << BITS, (count,), generator=generator_of(self.seed, "not private", *words))
        return (drawn.double() + 0.5) * 2.0**-BITS


SYSTEM = SystemRandomness()


def uniform(data: bytes) -> Tensor:
    """Numbers above 0 and below 1 out of 8 bytes each.

    >>> uniform(bytes(8)) == 2.0 ** -54, uniform(b"\\xff" * 8) < 1
    (tensor([True]), tensor([True]))
    """
    whole = torch.frombuffer(bytearray(data), dtype=torch.int64) & ((1 << BITS) - 1)
    return ((whole.double() + 0.5) * 2.0**-BITS).clamp_(max=1 - 2.0**-BITS)  # the largest would be rounded up to 1


def normals(source: Randomness, count: int, *words: object) -> Tensor:
    """(count) float64 of the normal distribution: z = sqrt(-2 ln u) cos(2 pi v), and the same with the sine."""
    half = -(-count // 2)
    u, v = source.uniforms(2 * half, *words).view(2, half)
    radius, angle = u.log_().mul_(-2).sqrt_(), v.mul_(2 * pi)
    return torch.cat([radius * angle.cos(), radius.mul_(angle.sin_())])[:count]


def with_noise(values: Tensor, deviation: float, source: Randomness, *words: object) -> Tensor:
    """`values` plus Gaussian noise, in 64 bits, on the grid of this deviation; without noise they stay as they are."""
    if not deviation:
        return values.double()
    noise = normals(source, values.numel(), *words).view(values.shape).mul_(deviation)
    cell = 2.0 ** (floor(log2(deviation)) - GRID)
    return noise.add_(values.double()).div_(cell).round_().mul_(cell)
