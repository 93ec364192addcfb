"""Random numbers that follow from what they are for, not from the order in which they are drawn.

Contract: What a device draws follows from the seed, the purpose, the round and the device's name, never from who works
beside it; private noise alone comes from the operating system (tests/federated/test_randomness.py, randomness.py).
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*words: object) -> int:
    """A seed that follows from words and numbers alone: the same on every machine, in every process, whoever asks first.

    >>> seed_of(3, "batches", 7, "ada") == seed_of(3, "batches", 7, "ada") != seed_of(3, "batches", 8, "ada")
    True
    """
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator_of(*words: object) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*words))
