"""Values sent between processes of one machine: tensors pass through shared memory, the rest through a pipe."""

from __future__ import annotations

import io
import mmap
import pickle
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64  # bytes: where tensors begin


class SharedBuffer:
    """Shared memory for one value at a time. Make it before the fork; pages that nobody writes take no memory."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def wrapped(self, value: Any) -> bytes:
        """The value as bytes for the pipe; tensors that fit are in the memory, where the other process finds them."""
        file = io.BytesIO()
        Wrapper(file, self.bytes).dump(value)
        return file.getvalue()

    def unwrapped(self, data: bytes) -> Any:
        """The value. Its tensors are views: who keeps one longer than until the next value clones it."""
        return Unwrapper(io.BytesIO(data), self.bytes).load()


class Wrapper(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.memory, self.end = memory, 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return None
        size = value.numel() * value.element_size()
        if self.end + size > len(self.memory):  # it goes through the pipe, slowly
            return None
        place = self.end
        if size:
            self.memory[place : place + size].view(value.dtype).view(value.shape).copy_(value)
        self.end = -(-(place + size) // ALIGNED) * ALIGNED
        return place, size, value.dtype, tuple(value.shape)


class Unwrapper(pickle.Unpickler):
    """Only ever reads what a process forked from this one wrote into a pipe between them."""

    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, found: Any) -> Tensor:
        place, size, dtype, shape = found
        if not size:
            return torch.empty(shape, dtype=dtype)
        return self.memory[place : place + size].view(dtype).view(shape)
