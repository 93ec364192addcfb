"""Read the weights of a finished run that kept them on disk, without the run that wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import regular

DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


class Reader:
    """Reads a store's file by the layout that a checkpoint records."""

    def __init__(self, path: Path, regions: Mapping[str, Sequence[int]]) -> None:
        self.path, self.regions = path, regions
        self.held = ("", bytearray())  # the region read last

    def region(self, name: str) -> bytearray:
        if self.held[0] != name:
            offset, size, slot, check = self.regions[name]
            with open(self.path, "rb", opener=regular) as file:
                if min(offset, size, slot) < 0 or offset + (slot + 1) * size > os.fstat(file.fileno()).st_size:
                    raise Mistake(
                        f"{name} is said to lie outside of {self.path}: the checkpoint is not one of this run"
                    )
                file.seek(offset + slot * size)
                self.held = (name, found := bytearray(file.read(size)))
            if xxh3_64(found).intdigest() != check:
                raise Mistake(
                    f"{name} in {self.path} is not what was written there (its checksum differs): the disk or somebody changed "
                    f"it, and the weights can't be had from there; train with --fresh to make them anew"
                )
        return self.held[1]

    def weights(self, entries: Mapping[str, Any]) -> dict[str, FileTensor]:
        return {name: FileTensor(self, entry) for name, entry in entries.items()}


class FileTensor:
    """A weight in the file of a finished run; `entry` says where, as written by Streaming.state_dict."""

    def __init__(self, reader: Reader, entry: Mapping[str, Any]) -> None:
        self.reader, self.parts = reader, entry["parts"]
        self.dtype = DTYPES[entry["dtype"]]
        self.shape = torch.Size(entry["shape"])

    def pieces(self) -> Iterator[Tensor]:
        for region, begin, shape, stride in self.parts:
            if min((begin, *shape)) < 0 or prod(shape) * self.dtype.itemsize > len(self.reader.region(region)):
                raise Mistake(
                    f"a part of a weight in {self.reader.path} is said to be larger than what is there: the checkpoint is not "
                    f"one of this run"
                )
            flat = torch.frombuffer(self.reader.region(region), dtype=torch.uint8)[begin:]
            flat = flat[: len(flat) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
            yield flat.as_strided(shape, stride, flat.storage_offset()).contiguous().reshape(-1)
