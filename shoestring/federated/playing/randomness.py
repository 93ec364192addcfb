"""Random numbers that differential privacy depends on: the noise, and the sampling of clients.

    SystemRandomness    the operating system's generator (os.urandom: ChaCha20, keyed by the kernel). It has no seed and leaves no state
                        in a checkpoint, so nobody can draw the same numbers again
    SeededRandomness    follows from a seed, for tests. **Not private**: whoever knows the seed can subtract the noise. Reports of such
                        a run say so

All other random choices of a federation (batches, held-out records, codecs, simulated behaviour) follow from the job's
seed (`seeds`). That seed is no secret, and privacy does not depend on it.

Gaussians are made by the Box-Muller method in 64 bits from 53-bit uniforms, so they end at 8.6 standard deviations (the
missing tail has probability 5e-18). With floating-point numbers, the low bits of a noisy sum can reveal the exact sum
(Mironov 2012, On Significance of the Least Significant Bits for Differential Privacy, CCS). Therefore `add_noise` adds
in 64 bits and rounds to a grid of 2^-20 of the standard deviation: every sum lands on the same grid, and rounding after
the noise costs no privacy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import floor, log2, pi
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shoestring.federated.playing.seeds import generator_of

BITS = 53  # random bits of a uniform number
AT_ONCE = 1 << 21  # numbers per call of os.urandom
GRID = 20  # the grid's spacing is 2^-20 to 2^-21 of the noise's standard deviation


class Randomness(Protocol):
    """A source of uniform numbers. `words` say what they are for; seeded numbers follow from them, as in
    `seeds.generator_of`."""

    secret: ClassVar[bool]

    def uniforms(self, count: int, *words: object) -> Tensor: ...  # (count) float64, above 0 and below 1


@dataclass(frozen=True)
class SystemRandomness:
    secret: ClassVar[bool] = True

    def uniforms(self, count: int, *words: object) -> Tensor:
        parts = [min(AT_ONCE, count - begin) for begin in range(0, count, AT_ONCE)]
        return (
            torch.cat([uniform_from_bytes(os.urandom(8 * part)) for part in parts])
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


def uniform_from_bytes(data: bytes) -> Tensor:
    """Uniform numbers above 0 and below 1, one from every 8 random bytes.

    >>> uniform_from_bytes(bytes(8)) == 2.0 ** -54, uniform_from_bytes(b"\\xff" * 8) < 1
    (tensor([True]), tensor([True]))
    """
    whole = torch.frombuffer(bytearray(data), dtype=torch.int64) & ((1 << BITS) - 1)
    return ((whole.double() + 0.5) * 2.0**-BITS).clamp_(max=1 - 2.0**-BITS)  # the largest would be rounded up to 1


def normals(source: Randomness, count: int, *words: object) -> Tensor:
    """Standard normal numbers, (count) float64: sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v)."""
    half = -(-count // 2)
    u, v = source.uniforms(2 * half, *words).view(2, half)
    radius, angle = u.log_().mul_(-2).sqrt_(), v.mul_(2 * pi)
    return torch.cat([radius * angle.cos(), radius.mul_(angle.sin_())])[:count]


def add_noise(values: Tensor, deviation: float, source: Randomness, *words: object) -> Tensor:
    """`values` plus Gaussian noise, in 64 bits, rounded to the deviation's grid. With deviation 0 they stay as they
    are."""
    if not deviation:
        return values.double()
    noise = normals(source, values.numel(), *words).view(values.shape).mul_(deviation)
    cell = 2.0 ** (floor(log2(deviation)) - GRID)
    return noise.add_(values.double()).div_(cell).round_().mul_(cell)
