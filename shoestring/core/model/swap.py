"""Construct a model that does not fit in memory: its tensors are swapped to a file while the user's own code makes
them.

The factory runs unchanged, with the same kernels and random draws, so the values are those of a normal construction. A
tensor that was not touched for a while is written to the file and its memory is freed; an operation that touches it
again finds it in memory. Only one tensor at a time must fit.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.private import DispatchMode, FakeTensor, storage_id, tree_leaves
from shoestring.core.units import bytes_text

SMALL = 1 << 16  # bytes: smaller tensors stay in memory
ROOM = 1 << 28  # bytes of large tensors that stay in memory


class SwappableStorage:
    """A large storage, in memory or in the file."""

    def __init__(self, storage: Any) -> None:
        self.storage = weakref.ref(storage)
        self.bytes = storage.nbytes()
        self.offset: int | None = None  # in the file, once it was written there
        self.away = False


class Swap(DispatchMode):
    """While active, about `room` bytes of large tensors are in memory; at the end all that still live are brought
    back."""

    def __init__(self, directory: str | None = None, room: int = ROOM) -> None:
        super().__init__()
        self.room, self.held, self.end = room, 0, 0
        self.directory = directory or tempfile.gettempdir()
        self.file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 (it lives as long as this object)
        self.known: OrderedDict[int, SwappableStorage] = (
            OrderedDict()
        )  # keyed by storage address, least recently used first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        busy = [self.bring_back(leaf) for leaf in tree_leaves((args, kwargs or {})) if is_real(leaf)]
        out = func(*args, **(kwargs or {}))
        busy += [self.bring_back(leaf) for leaf in tree_leaves(out) if is_real(leaf)]
        for key, large in list(self.known.items()):
            if self.held <= self.room:
                break
            storage = large.storage()
            if key not in busy and not large.away and storage is not None and storage.resizable():
                self.send(large, storage)
        return out

    def bring_back(self, tensor: Tensor) -> int:
        """Bring a swapped-out tensor back into memory; returns the address of its storage."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self.known:
            self.known.move_to_end(key)
            if self.known[key].away:
                self.bring(self.known[key], storage)
        elif storage.nbytes() >= SMALL:
            self.known[key] = SwappableStorage(storage)
            self.held += storage.nbytes()
            weakref.finalize(storage, self.forget, key)
        return key

    def forget(self, key: int) -> None:
        """A storage was freed."""
        large = self.known.pop(key)
        self.held -= 0 if large.away else large.bytes

    def send(self, large: SwappableStorage, storage: torch.UntypedStorage) -> None:
        if large.offset is None:
            large.offset, self.end = self.end, self.end + large.bytes
        view, done = as_bytes(storage), 0
        try:
            while done < large.bytes:
                done += os.pwrite(self.file.fileno(), view[done:], large.offset + done)
        except OSError as error:
            raise Mistake(
                f"while a model that does not fit in memory is made, its weights wait in a file in {self.directory}, and after "
                f"{bytes_text(large.offset + done)} that could not be written ({error.strerror}): free some space there, or name "
                f"another disk in the variable TMPDIR"
            ) from error
        del view
        storage.resize_(0)
        large.away = True
        self.held -= large.bytes

    def bring(self, large: SwappableStorage, storage: torch.UntypedStorage) -> None:
        assert large.offset is not None, "a storage outside of memory was written to the file"
        storage.resize_(large.bytes)
        view, done = as_bytes(storage), 0
        while done < large.bytes:
            done += os.preadv(self.file.fileno(), [view[done:]], large.offset + done)
        large.away = False
        self.held += large.bytes

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        for large in [large for large in self.known.values() if large.away and not any(problem)]:
            storage = large.storage()
            if storage is not None:
                self.bring(large, storage)
        self.file.close()


def is_real(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and not isinstance(leaf, FakeTensor)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
    )


def as_bytes(storage: Any) -> memoryview:
    """The memory of a storage. A NumPy array would do too, but would make the storage non-resizable."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
