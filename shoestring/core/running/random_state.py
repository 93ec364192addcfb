"""The random states of Python, NumPy and torch as one."""

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
    """Seed all global generators."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_worker(number: int, rank: int, step: int = 0) -> None:
    """Seed all generators for one worker of a group; the first worker's are those of a single process."""
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
    """A random state of its own: inside `with stream.drawing()` all generators use it, and afterwards theirs are
    restored."""

    def __init__(self, number: int) -> None:
        with fork_rng():
            seed(number)
            self.state = state()

    def take(self, saved: State) -> None:
        """Continue from a saved state. It is tried at once, because it may be of a file that anybody wrote."""
        with fork_rng():
            restore(saved)
            self.state = state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        with fork_rng():
            restore(self.state)
            try:
                yield
            finally:
                self.state = state()


@contextmanager
def fork_rng() -> Iterator[None]:
    """While inside, anything may be drawn: the state of all generators is restored afterwards, as by `torch.random.fork_rng`."""
    before = state()
    try:
        yield
    finally:
        restore(before)


def drawing_apart(found: Generator[T, None, None]) -> Iterator[T]:
    """The same values, with the generator's code running on its own random state, which starts as the caller's: numbers
    drawn between two values do not affect it, and it does not affect the caller's generators."""
    own = state()
    try:
        while True:
            with fork_rng():
                restore(own)
                try:
                    value = next(found)
                except StopIteration:
                    return
                own = state()
            yield value
    finally:
        with fork_rng():
            restore(own)
            found.close()  # its cleanup may draw, and may save its random state
