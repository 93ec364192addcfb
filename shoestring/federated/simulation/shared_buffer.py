"""Sends values between processes of one machine: tensors through shared memory, everything else through a pipe."""

from __future__ import annotations

import io
import mmap
import pickle
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64  # tensors begin at multiples of so many bytes


class SharedBuffer:
    """Shared memory for one value at a time. Make it before forking; untouched pages take no memory."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    def pack(self, value: Any) -> bytes:
        """Pickle a value for the pipe. Tensors that fit go into the shared memory instead."""
        file = io.BytesIO()
        TensorPickler(file, self.bytes).dump(value)
        return file.getvalue()

    def unpack(self, data: bytes) -> Any:
        """The value. Its tensors are views of the shared memory: clone those that must outlive the next `pack`."""
        return TensorUnpickler(io.BytesIO(data), self.bytes).load()


class TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.memory, self.end = memory, 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return None
        size = value.numel() * value.element_size()
        if self.end + size > len(self.memory):  # no room left: the tensor goes through the pipe, which is slower
            return None
        place = self.end
        if size:
            self.memory[place : place + size].view(value.dtype).view(value.shape).copy_(value)
        self.end = -(-(place + size) // ALIGNED) * ALIGNED
        return place, size, value.dtype, tuple(value.shape)


class TensorUnpickler(pickle.Unpickler):
    """Reads pickles of our own forked processes only, so unpickling is safe."""

    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, found: Any) -> Tensor:
        place, size, dtype, shape = found
        if not size:
            return torch.empty(shape, dtype=dtype)
        return self.memory[place : place + size].view(dtype).view(shape)
