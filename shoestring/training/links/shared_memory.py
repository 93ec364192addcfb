"""Memory shared by all workers of one machine: a file in a memory file system that each worker maps, unlinked once all
have it."""

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
from shoestring.core.files.files import clear, make_and_lock
from shoestring.core.units import bytes_text
from shoestring.core.workers.link import Link

LINE = 64  # bytes: alignment of tensors
PLACES = ("/dev/shm", tempfile.gettempdir())
PREFIX = "shoestring-shared-"


class Shared:
    """Tensors moved to shared memory, with the first worker's values, and room for counters. An imagined group uses its
    own memory."""

    def __init__(self, link: Link, tensors: Sequence[Tensor], count: int = 0) -> None:
        begin = round_up_to_line(count)
        size = begin + sum(round_up_to_line(tensor.nbytes) for tensor in tensors)
        self.file: int | None = None
        if link.imagined:
            memory = tensors[0].detach().new_empty(size, dtype=torch.uint8)
            self.numbers: np.ndarray[Any, Any] = np.zeros(count, dtype=np.uint8)
            move(tensors, memory, begin, fill=link.rank == 0)
            return
        with offer_file(link, size) as path:
            require(link, path, size)
            self.file = os.open(path, os.O_RDONLY) if count else None  # locked by a worker that changes a counter
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.numbers = memory[:count].numpy()
            move(tensors, memory, begin, fill=link.rank == 0)
            link.objects("the file exists and is filled")


def move(tensors: Sequence[Tensor], memory: Tensor, begin: int, fill: bool) -> None:
    """Move tensors into this memory, one after the other from byte `begin`; `fill`: copy their values too."""
    for tensor in tensors:
        there = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if fill:
            there.copy_(tensor.detach())
        tensor.data = there
        begin += round_up_to_line(tensor.nbytes)


def require(link: Link, path: str, size: int) -> None:
    """Refuse a group that does not share memory, or memory that is too small."""
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
def offer_file(link: Link, size: int) -> Iterator[str]:
    """The name of a new shared file of `size` bytes, not yet opened by any worker; "" if there is no room. The first
    worker unlinks it on exit; if it is killed before that, the file stays behind and the next run removes it."""
    own = create_file(size) if link.rank == 0 else None
    try:
        yield link.objects(own[0] if own else "")[0]
    finally:
        if own:
            os.unlink(own[0])
            os.close(own[1])


def create_file(size: int) -> tuple[str, int] | None:
    """The name of a new file of `size` bytes, and the open, locked file; None if there is no room."""
    for place in PLACES:
        clear(Path(place).glob(f"{PREFIX}*"))
        with suppress(OSError):
            path, file = make_and_lock(partial(with_room, place, size))
            return str(path), file
    return None


def with_room(place: str, size: int) -> Path:
    file, path = tempfile.mkstemp(prefix=PREFIX, dir=place)
    try:
        if hasattr(os, "posix_fallocate"):  # without it, a full file system shows only when a write raises SIGBUS
            os.posix_fallocate(file, 0, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return Path(path)


def round_up_to_line(size: int) -> int:
    """
    >>> round_up_to_line(0), round_up_to_line(1), round_up_to_line(64)
    (0, 64, 64)
    """
    return -(-size // LINE) * LINE
