"""Memory that all workers of one machine see: a file that lives in memory, mapped by each, whose name is gone when all have it."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.link import Link
from shoestring.core.units import bytes_text

LINE = 64   # bytes: every tensor begins at a multiple
PLACES = ("/dev/shm", tempfile.gettempdir())


class Shared:
    """Tensors that were moved there, with the first worker's values, and bytes for numbers. An imagined group has memory of its own."""

    def __init__(self, link: Link, tensors: Sequence[Tensor], count: int = 0) -> None:
        begin = aligned(count)
        size = begin + sum(aligned(tensor.nbytes) for tensor in tensors)
        self.file: int | None = None
        if link.imagined:
            memory = tensors[0].detach().new_empty(size, dtype=torch.uint8)
            self.numbers: np.ndarray[Any, Any] = np.zeros(count, dtype=np.uint8)
        else:
            path = joined(link, size)
            self.file = os.open(path, os.O_RDONLY) if count else None   # to be locked by who changes a number
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self.numbers = memory[:count].numpy()
        for tensor in tensors:
            there = memory[begin:begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if link.rank == 0:
                there.copy_(tensor.detach())
            tensor.data = there
            begin += aligned(tensor.nbytes)
        if not link.imagined:
            link.objects("it is there, and filled")
            if link.rank == 0:
                os.unlink(path)


def joined(link: Link, size: int) -> str:
    """The name of a file that all workers see."""
    path: str = link.objects(made(size) if link.rank == 0 else "")[0]
    if not path:
        raise Mistake(f"no room for {bytes_text(size)} of weights that workers share, in {' or '.join(PLACES)}: make some, or use "
                      f'Asynchronous(kind="server")')
    if not all(link.objects(os.path.exists(path))):
        if link.rank == 0:
            os.unlink(path)
        raise Mistake('Asynchronous(kind="hogwild") keeps the weights in memory that all workers see, and these are on several '
                      'machines: use Asynchronous(kind="server")')
    return path


def made(size: int) -> str:
    """A new file with room for so many bytes; no name if there is none."""
    for place in PLACES:
        try:
            file, path = tempfile.mkstemp(prefix="shoestring-", dir=place)
        except OSError:
            continue
        try:
            if hasattr(os, "posix_fallocate"):   # else a full file system shows when it is written to, and kills
                os.posix_fallocate(file, 0, size)
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(file)
    return ""


def aligned(size: int) -> int:
    """
    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-size // LINE) * LINE
