"""Pruning masks: zero the weights with the lowest scores, or random ones drawn from a seed; always exactly the
requested number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def zeros_of(count: int, share: float) -> int:
    """Number of zeros among `count` weights at this sparsity, rounded to the nearest whole number.

    >>> zeros_of(10, 0.9), zeros_of(7, 0.5)
    (9, 4)
    """
    return int(share * count + 0.5)


def lowest(scores: Tensor, count: int) -> Tensor:
    """True for the `count` lowest of all scores; ties go to the first.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2, 0.1, 0.1]), 2)
    tensor([False,  True, False,  True, False])
    """
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    flat = scores.flatten()
    limit = flat.kthvalue(count).values
    found, equal = flat < limit, flat == limit
    spare = count - found.sum()
    return (found | (equal & (equal.cumsum(0, dtype=torch.int32) <= spare))).view(scores.shape)


def zero_masks(scores: Sequence[Tensor], share: float, each: bool) -> list[Tensor]:
    """Masks that are true where scores are lowest: this share of `each` tensor on its own, or of all tensors together."""
    if each:
        return [lowest(one, zeros_of(one.numel(), share)) for one in scores]
    sizes = [one.numel() for one in scores]
    whole = torch.cat([one.flatten() for one in scores])
    masks = lowest(whole, zeros_of(len(whole), share)).split(sizes)
    return [mask.view(one.shape) for mask, one in zip(masks, scores, strict=True)]


def seed_scores(count: int, seed: int) -> Tensor:
    """A score for each of `count` weights that follows from the seed, the same on every machine and no two alike.

        z = seed + (i + 1) 9E3779B97F4A7C15    z = (z ^ z >> 30) BF58476D1CE4E5B9    z = (z ^ z >> 27) 94D049BB133111EB    z ^ z >> 31

    in 64 bits without sign (every line can be undone, so different i give different scores), and 2^63 less, as torch
    has signed numbers. Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, doi
    10.1145/2660193.2660195 (SplitMix64).

    >>> seed_scores(2, seed=0).tolist()
    [7070836379803831727, -1263085514660420108]
    """
    z = torch.arange(1, count + 1, dtype=torch.int64) * to_signed(GOLDEN) + to_signed(seed)
    z = (z ^ shift_right(z, 30)) * to_signed(FIRST)
    z = (z ^ shift_right(z, 27)) * to_signed(SECOND)
    return z ^ shift_right(z, 31) ^ to_signed(1 << 63)


def to_signed(number: int) -> int:
    """The signed 64-bit integer with these bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def shift_right(z: Tensor, places: int) -> Tensor:
    """z >> places, with zeros coming in from the left whatever the sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)


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
    """The seed of one weight's mask: the first 63 bits of the SHA-256 of the run's seed and the weight's name.

    >>> seed_of(0, "fc.weight")
    8537289753555254568
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
