"""Seeds derived from the purpose of a draw instead of a shared generator's state, so the order of draws does not
matter.

Contract: What a device draws follows from the seed, the purpose, the round and the device's name, never from who works
beside it; private noise alone comes from the operating system (tests/federated/playing/test_randomness.py, randomness.py).
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*words: object) -> int:
    """A seed computed from words and numbers: the same on every machine and in every process.

    >>> seed_of(3, "batches", 7, "ada") == seed_of(3, "batches", 7, "ada") != seed_of(3, "batches", 8, "ada")
    True
    """
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator_of(*words: object) -> torch.Generator:
    """A generator seeded by `seed_of`."""
    return torch.Generator().manual_seed(seed_of(*words))
