"""The random states of Python, NumPy and torch, as one."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

State = dict[str, Any]
T = TypeVar("T")


def seed(number: int) -> None:
    """Begin anew from a number."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_worker(number: int, rank: int, step: int = 0) -> None:
    """Begin anew as one worker of a group; the first begins as a process alone does."""
    seed(number if rank == step == 0 else hash((number, rank, step)) % 2**32)


def state() -> State:
    """The state of all global generators; `restore` puts it back."""
    kind, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (kind, np.array(keys), *rest),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore(saved: State) -> None:
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(saved["cuda"])


class RandomStream:
    """A random state of its own: inside `with stream.drawing()` all generators draw from it, and afterwards they stand where they stood."""

    def __init__(self, number: int) -> None:
        with kept():
            seed(number)
            self.state = state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with kept():
            restore(self.state)
            try:
                yield
            finally:
                self.state = state()


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators stand afterwards where they stood."""
    before = state()
    try:
        yield
    finally:
        restore(before)


def drawing_apart(found: Generator[T, None, None]) -> Iterator[T]:
    """The same, with global generators of its own, which begin where the caller's stand: whoever draws between two values changes nothing
    for it, and meets generators that stand where they stood."""
    own = state()
    try:
        while True:
            with kept():
                restore(own)
                try:
                    value = next(found)
                except StopIteration:
                    return
                own = state()
            yield value
    finally:
        with kept():
            restore(own)
            found.close()  # its end may draw, and may save the state it ends with
