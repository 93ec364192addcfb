"""Memory that all workers of one machine see: a file that lives in memory, mapped by each, whose name is gone when all have it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.files import clear, made_and_held
from shoestring.core.link import Link
from shoestring.core.units import bytes_text

LINE = 64  # bytes: every tensor begins at a multiple
PLACES = ("/dev/shm", tempfile.gettempdir())
PREFIX = "shoestring-shared-"


class Shared:
    """Tensors that were moved there, with the first worker's values, and bytes for numbers. An imagined group has memory of its own."""

    def __init__(self, link: Link, tensors: Sequence[Tensor], count: int = 0) -> None:
        begin = aligned(count)
        size = begin + sum(aligned(tensor.nbytes) for tensor in tensors)
        self.file: int | None = None
        if link.imagined:
            memory = tensors[0].detach().new_empty(size, dtype=torch.uint8)
            self.numbers: np.ndarray[Any, Any] = np.zeros(count, dtype=np.uint8)
            move(tensors, memory, begin, fill=link.rank == 0)
            return
        with offered(link, size) as path:
            require(link, path, size)
            self.file = os.open(path, os.O_RDONLY) if count else None  # to be locked by who changes a number
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.numbers = memory[:count].numpy()
            move(tensors, memory, begin, fill=link.rank == 0)
            link.objects("it is there, and filled")


def move(tensors: Sequence[Tensor], memory: Tensor, begin: int, fill: bool) -> None:
    """Let tensors lie in this memory, one after the other from a byte on; `fill`: with the values that they have."""
    for tensor in tensors:
        there = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if fill:
            there.copy_(tensor.detach())
        tensor.data = there
        begin += aligned(tensor.nbytes)


def require(link: Link, path: str, size: int) -> None:
    """Refuse what not all workers see."""
    if not path:
        raise Mistake(
            f"no room for {bytes_text(size)} of weights that workers share, in {' or '.join(PLACES)}: make some, or use "
            f'Asynchronous(kind="server")'
        )
    if not all(link.objects(os.path.exists(path))):
        raise Mistake(
            'Asynchronous(kind="hogwild") keeps the weights in memory that all workers see, and these are on several '
            'machines: use Asynchronous(kind="server")'
        )


@contextmanager
def offered(link: Link, size: int) -> Iterator[str]:
    """The name of a new file of so many bytes that all workers of a machine see; empty if there is no room. Nobody has opened it yet, and
    it loses its name when the first worker leaves: until then a worker that is killed leaves it behind, for the next one to clear."""
    own = made(size) if link.rank == 0 else None
    try:
        yield link.objects(own[0] if own else "")[0]
    finally:
        if own:
            os.unlink(own[0])
            os.close(own[1])


def made(size: int) -> tuple[str, int] | None:
    """The name of a new file with room for so many bytes, and the file, locked; none if there is no room."""
    for place in PLACES:
        clear(Path(place).glob(f"{PREFIX}*"))
        with suppress(OSError):
            path, file = made_and_held(partial(with_room, place, size))
            return str(path), file
    return None


def with_room(place: str, size: int) -> Path:
    file, path = tempfile.mkstemp(prefix=PREFIX, dir=place)
    try:
        if hasattr(os, "posix_fallocate"):  # else a full file system shows when it is written to, and kills
            os.posix_fallocate(file, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return Path(path)


def aligned(size: int) -> int:
    """
    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-size // LINE) * LINE
