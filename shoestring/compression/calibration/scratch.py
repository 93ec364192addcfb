"""Scratch file for tensors: candidates of a search are kept in an unnamed temporary file instead of in memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import Mistake


class ScratchTensor(NamedTuple):
    """Location of a tensor in the file."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Scratch:
    """A temporary file of tensors. It disappears with the process or with this object; reading returns copies."""

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
        """Overwrite a tensor of the same shape and dtype."""
        assert tuple(tensor.shape) == place.shape and tensor.dtype == place.dtype, "shape and dtype must not change"
        rest, offset = bytes_of(tensor.detach().contiguous()), place.offset
        try:
            while rest:
                written = os.pwrite(self.file.fileno(), rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            raise Mistake(
                f"compressing keeps candidates in a temporary file, but {len(rest):,} bytes could not be written to "
                f"{tempfile.gettempdir()} ({error.strerror}): make room there, or set TMPDIR to another folder"
            ) from error

    def read(self, place: ScratchTensor) -> Tensor:
        found = torch.empty(place.shape, dtype=place.dtype)
        self.read_into(found, place)
        return found

    def read_rows(self, places: Sequence[ScratchTensor]) -> Tensor:
        """Several tensors, joined along their first dimension; only the result is in memory."""
        sizes, first = [place.shape[0] for place in places], places[0]
        found = torch.empty((sum(sizes), *first.shape[1:]), dtype=first.dtype)
        for part, place in zip(found.split(sizes), places, strict=True):
            self.read_into(part, place)
        return found

    def read_into(self, target: Tensor, place: ScratchTensor) -> None:
        rest, offset = bytes_of(target), place.offset
        while rest:
            count = os.preadv(self.file.fileno(), [rest], offset)
            assert count, "the unnamed file can't be truncated by anybody else"
            rest, offset = rest[count:], offset + count


def trim() -> None:
    """Return freed memory to the operating system, if the C library has `malloc_trim`."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def bytes_of(tensor: Tensor) -> memoryview:
    """A view of a contiguous tensor's memory."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
