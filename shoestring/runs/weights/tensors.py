"""Safetensors files, written and read piece by piece.

The safetensors library needs all bytes in memory at once, or maps the file into the process; a run with a memory budget
can afford neither. The format is simple: the length of a JSON header, the header, the bytes. Reading runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import regular
from shoestring.core.files.untrusted_json import parse_json
from shoestring.core.running.run_state import StoredTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 1 << 24  # bytes per read or write
LONGEST = 100 << 20  # largest header in bytes, by the format


class UnreadableTensors(ValueError):
    """A file that is no valid safetensors file."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, str] | None = None
) -> int:
    """Write tensors to a file; returns its size. Nothing is synced."""
    header = header_of({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, metadata)
    with open(path, "wb", buffering=0) as file:
        write_all(file.fileno(), header)
        for tensor in tensors.values():
            for piece in pieces(tensor):
                write_all(file.fileno(), piece)
    return len(header) + sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the tensors: the length of the header, and the header."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in NAMES:
            raise Mistake(f"the tensor {name!r} is of {dtype}, which the safetensors format does not have")
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_all(file: int, data: Any) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(file, view) :]


def pieces(tensor: Tensor | StoredTensor) -> Iterator[Any]:
    """A tensor's bytes in order, piece by piece."""
    if not isinstance(tensor, Tensor):
        for part in tensor.pieces():
            yield from pieces(part)
        return
    flat = tensor.detach().to_dense().contiguous().reshape(-1)
    if not flat.numel():
        return
    raw = flat.view(torch.uint8)
    for start in range(0, len(raw), PIECE):
        yield raw[start : start + PIECE].cpu().numpy()


class TensorEntry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """The tensors of a file, read when needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST):
                raise UnreadableTensors(
                    f"{path.name} is not a safetensors file: its header is said to have {length} of {size} bytes"
                )
            try:
                header = parse_json(file.read(length))
                self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
                self.entries = {
                    str(name): TensorEntry(
                        DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"])
                    )
                    for name, entry in header.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise UnreadableTensors(
                    f"{path.name} is not a safetensors file: {type(error).__name__}: {error}"
                ) from error
        self.start = 8 + length
        for name, (dtype, shape, begin, end) in self.entries.items():
            if (
                min((begin, *shape)) < 0
                or not begin <= end <= size - self.start
                or end - begin != prod(shape) * dtype.itemsize
            ):
                raise UnreadableTensors(
                    f"{path.name}: the tensor {name!r} lies outside of the file or does not have the size of its shape"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def later(self, name: str) -> StoredTensor:
        """A tensor that is read when needed."""
        return LazyTensor(self, name)

    def outline(self) -> dict[str, Tensor]:
        """The tensors on the meta device, which takes no memory."""
        return {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in self.entries.items()
        }

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self[name]) for name in self)

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, begin, end = self.entries[name]
        made = torch.empty(shape, dtype=dtype)
        if end > begin:
            with open(self.path, "rb", buffering=0, opener=regular) as file:
                file.seek(self.start + begin)
                view = made.reshape(-1).view(torch.uint8).numpy().data
                while len(view):
                    count = file.readinto(view)
                    if not count:
                        raise UnreadableTensors(f"{self.path.name} ends in the middle of {name!r}")
                    view = view[count:]
        return made


class LazyTensor:
    def __init__(self, file: TensorFile, name: str) -> None:
        self.file, self.name = file, name
        self.dtype, self.shape = file.entries[name].dtype, torch.Size(file.entries[name].shape)

    def pieces(self) -> Iterator[Tensor]:
        yield self.file[self.name]
