"""Which weights are zero: the smallest, or those that a seed says; always exactly as many as asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def zeros_of(count: int, share: float) -> int:
    """How many of `count` weights are zero where a share is asked for: the nearest whole number.

    >>> zeros_of(10, 0.9), zeros_of(7, 0.5)
    (9, 4)
    """
    return int(share * count + 0.5)


def lowest(scores: Tensor, count: int) -> Tensor:
    """True for the `count` lowest of all scores; of equal ones, the first are taken.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2, 0.1, 0.1]), 2)
    tensor([False,  True, False,  True, False])
    """
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    flat = scores.flatten()
    limit = flat.kthvalue(count).values
    found, equal = flat < limit, flat == limit
    spare = count - int(found.sum())
    return (found | (equal & (equal.cumsum(0) <= spare))).view(scores.shape)


def kept_masks(scores: Sequence[Tensor], share: float, each: bool) -> list[Tensor]:
    """Masks, true for what stays, without the lowest scores: this share of `each` tensor, or of all of them together."""
    if each:
        return [~lowest(one, zeros_of(one.numel(), share)) for one in scores]
    sizes = [one.numel() for one in scores]
    whole = torch.cat([one.flatten() for one in scores])
    return [
        part.view(one.shape)
        for part, one in zip((~lowest(whole, zeros_of(len(whole), share))).split(sizes), scores, strict=True)
    ]


def seed_scores(count: int, seed: int) -> Tensor:
    """A score for each of `count` weights that follows from the seed, the same on every machine and no two alike.

        z = seed + (i + 1) 9E3779B97F4A7C15    z = (z ^ z >> 30) BF58476D1CE4E5B9    z = (z ^ z >> 27) 94D049BB133111EB    z ^ z >> 31

    in 64 bits without sign (every line can be undone, so different i give different scores), and 2^63 less, as torch has signed numbers.
    Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, doi 10.1145/2660193.2660195 (SplitMix64).

    >>> seed_scores(2, seed=0).tolist()
    [7070836379803831727, -1263085514660420108]
    """
    with np.errstate(over="ignore"):
        z = np.uint64(seed % 2**64) + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * FIRST
        z = (z ^ (z >> np.uint64(27))) * SECOND
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z ^ np.uint64(2**63)).view(np.int64))


def seed_mask(shape: Sequence[int], share: float, seed: int) -> Tensor:
    """A random mask that can be stored as its shape, share and seed: true for what stays, exactly `zeros_of` false.

    A larger share takes away all that a smaller one does, so that a schedule's masks lie in one another.

    >>> seed_mask((2, 4), share=0.5, seed=3)
    tensor([[False,  True,  True, False],
            [False,  True, False,  True]])
    """
    size = torch.Size(shape)
    return ~lowest(seed_scores(size.numel(), seed), zeros_of(size.numel(), share)).view(size)


def seed_of(seed: int, name: str) -> int:
    """The seed of one weight's mask: the first 63 bits of the SHA-256 of the job's seed and the weight's name.

    >>> seed_of(0, "fc.weight")
    8537289753555254568
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
