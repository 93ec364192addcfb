"""Tensors that are put aside: in a temporary file without a name, so that what a search keeps does not stand in memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import Mistake


class ScratchTensor(NamedTuple):
    """Where a tensor lies in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Scratch:
    """A file that ends with the process, or with this object. Whatever is read from it is a copy of its own."""

    def __init__(self) -> None:
        self.file, self.end = tempfile.TemporaryFile(buffering=0), 0  # noqa: SIM115 (it lives as long as this object)

    def keep(self, tensor: Tensor) -> ScratchTensor:
        """
        >>> scratch = Scratch()
        >>> scratch.read(scratch.keep(torch.arange(3)))
        tensor([0, 1, 2])
        """
        place = ScratchTensor(self.end, tuple(tensor.shape), tensor.dtype)
        self.end += prod(place.shape) * place.dtype.itemsize
        self.write(place, tensor)
        return place

    def write(self, place: ScratchTensor, tensor: Tensor) -> None:
        """In the place of what is there, which has the same shape."""
        assert tuple(tensor.shape) == place.shape and tensor.dtype == place.dtype, "a place is for tensors of one shape"
        rest, offset = bytes_of(tensor.detach().contiguous()), place.offset
        try:
            while rest:
                written = os.pwrite(self.file.fileno(), rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            raise Mistake(
                f"compressing keeps what it tried in a temporary file, and {len(rest):,} bytes of it could not be written to "
                f"{tempfile.gettempdir()} ({error.strerror}): make room there, or set TMPDIR to another folder"
            ) from error

    def read(self, place: ScratchTensor) -> Tensor:
        found = torch.empty(place.shape, dtype=place.dtype)
        rest, offset = bytes_of(found), place.offset
        while rest:
            count = os.preadv(self.file.fileno(), [rest], offset)
            assert count, "what was kept is there: nobody else can reach the file"
            rest, offset = rest[count:], offset + count
        return found


def trim() -> None:
    """Give memory that was freed back to the system, where the C library can: it keeps what it thinks will be asked for again."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor itself."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
