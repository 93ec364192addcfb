"""The disk store: one file for state that does not fit in memory, in regions that are read ahead and written behind.

    region    a name and a fixed number of bytes, in whole pages; it has two slots in the file, or one if it is never written again
              after the first checkpoint (frozen weights) or is not part of checkpoints (gradients that wait within a step)
    write     goes to the slot that the last checkpoint does not use, so that a crash never meets a half-written state
    pin       a checkpoint was saved: it uses the slots that are current now
    check     every slot has a checksum (XXH3), made when it is written and compared whenever it is read

A checkpoint of this state copies nothing: the two slots swap roles. Bytes move by direct I/O (O_DIRECT) where the file
system supports it, so that the page cache takes no memory from others. `read` and `write` return at once: threads do
the work, and a request waits for the previous one on the same buffer or region. With fake tensors (a rehearsal) nothing
moves, and bytes are counted.

Contract: What a checkpoint stands on is not written over, and every read is checked (tests/runs/weights/test_disk_weights.py,
decisions/007). Weights that are kept elsewhere are asked of the run (`core.run.weights`), never of the model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import NotRegular, regular
from shoestring.core.private import FakeTensor
from shoestring.core.running.run_state import LivesOnDisk
from shoestring.core.units import bytes_text

PAGE = 4096  # bytes: direct I/O needs offsets, sizes and addresses that are multiples of it
AT_ONCE = 8 << 20  # bytes that are moved and checksummed at once
THREADS = 3


def pages(size: int) -> int:
    """A size rounded up to whole pages.

    >>> pages(1), pages(4096), pages(4097)
    (4096, 4096, 8192)
    """
    return -(-size // PAGE) * PAGE


class AlignedBuffer:
    """Memory that direct I/O can use (aligned to a page), and the request that is using it now."""

    def __init__(self, size: int, kind: Tensor) -> None:
        imagined = isinstance(kind, FakeTensor)
        whole = kind.new_empty(pages(size) + PAGE, dtype=torch.uint8, device="cpu")
        shift = 0 if imagined else -whole.data_ptr() % PAGE
        self.bytes = whole[shift : shift + pages(size)]
        self.view = None if imagined else memoryview(self.bytes.numpy())  # type: ignore[arg-type]
        self.pending: Future[None] | None = None

    def wait(self) -> None:
        """Wait until no transfer uses this buffer."""
        if self.pending is not None:
            wait_for_transfer(self.pending)
            self.pending = None

    def part(
        self, begin: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Tensor:
        """A view of the buffer as a tensor, starting at byte `begin`."""
        flat = self.bytes[begin : begin + prod(shape) * dtype.itemsize].view(dtype)
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride, flat.storage_offset())


@dataclass
class Region:
    name: str
    offset: int  # of its first slot; the second follows
    size: int  # bytes of a slot
    slots: int = 2  # one: it is only written while no checkpoint uses it
    lasting: bool = True  # it outlives a step, so it is part of checkpoints
    current: int = 0  # the slot that was written last
    pinned: int | None = None  # the slot that the last checkpoint uses
    checks: tuple[int, int] = (0, 0)  # checksum of each slot
    written: bool = False
    version: int = 0  # how often it was written
    pending: Future[None] | None = None


class DiskStore:
    """Regions in a file. `reserve` all of them, then `open`."""

    def __init__(self, path: Path | None, kind: Tensor) -> None:
        self.path = path  # None: an unnamed file, which disappears with the process
        self.kind = kind  # an empty tensor; buffers are fake if it is fake
        self.imagined = isinstance(kind, FakeTensor)
        self.regions: dict[str, Region] = {}
        self.end = 0  # bytes of the file
        self.moved = 0  # bytes of all requests, reads and writes
        self.direct = True
        self.file = -1
        self.lock = Lock()
        self.aside = ""  # the file's new name after it was found damaged and set aside
        self.threads: ThreadPoolExecutor | None = None

    def reserve(self, name: str, size: int, slots: int = 2, lasting: bool = True) -> None:
        assert name not in self.regions, f"{name} is reserved already"
        self.regions[name] = Region(name, self.end, pages(size), slots, lasting)
        self.end += slots * pages(size)

    def open(self) -> None:
        """Allocate the file; if the disk lacks room, refuse with the missing amount before anything is written."""
        if self.imagined or self.threads is not None or not self.end:
            return
        directory = self.path.parent if self.path else Path(tempfile.gettempdir())
        there = self.path.stat().st_blocks * 512 if self.path and self.path.exists() else 0
        require_room(directory, self.end, there)
        self.file = self.open_file(directory)
        try:
            os.posix_fallocate(self.file, 0, self.end)
        except OSError as error:
            raise Mistake(
                f"the state needs {bytes_text(self.end)} on the disk of {directory}, which could not be reserved: "
                f"{error.strerror}"
            ) from error
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk store")

    def open_file(self, directory: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a sent folder may hold a symbolic link
        if self.path is None:
            number, name = tempfile.mkstemp(dir=directory)
            os.close(number)
        else:
            name = str(self.path)
        try:
            file = regular(name, flags | os.O_DIRECT, 0o600)
        except NotRegular:
            raise
        except OSError:
            self.direct = False
            file = regular(name, flags, 0o600)
        if self.path is None:
            os.unlink(name)
        return file

    def buffer(self, size: int) -> AlignedBuffer:
        return AlignedBuffer(size, self.kind)

    def read(self, name: str, buffer: AlignedBuffer, begin: int = 0) -> None:
        """Start to read a region into a buffer, from byte `begin` of the region (a multiple of a page)."""
        region = self.regions[name]
        self.moved += region.size
        slot = region.current
        before = region.pending
        self.request(buffer, before, lambda view: self.read_now(region, slot, view), begin, region.size)
        region.pending = buffer.pending

    def write(self, name: str, buffer: AlignedBuffer, begin: int = 0) -> None:
        """Start to write a buffer to a region; the buffer must not change until that is done."""
        region = self.regions[name]
        self.moved += region.size
        assert region.slots > 1 or region.pinned is None, f"{name} has one slot, and a checkpoint uses it"
        slot = 0 if region.pinned is None else 1 - region.pinned
        region.current, region.written = slot, True
        region.version += 1
        before = region.pending
        self.request(buffer, before, lambda view: self.write_now(region, slot, view), begin, region.size)
        region.pending = buffer.pending

    def request(
        self,
        buffer: AlignedBuffer,
        before: Future[None] | None,
        work: Callable[[memoryview], None],
        begin: int,
        size: int,
    ) -> None:
        if self.imagined:
            return
        assert self.threads is not None, "the store is open"
        earlier = buffer.pending
        assert buffer.view is not None, "real bytes move in real memory"
        view = buffer.view[begin : begin + size]

        def work_in_turn() -> None:
            for other in (earlier, before):
                if other is not None:
                    other.result()
            work(view)

        buffer.pending = self.threads.submit(work_in_turn)

    def write_now(self, region: Region, slot: int, view: memoryview) -> None:
        check = xxh3_64()
        begin = region.offset + slot * region.size
        for start in range(0, region.size, AT_ONCE):
            part = view[start : start + AT_ONCE]
            check.update(part)
            done = 0
            while done < len(part):
                done += os.pwrite(self.file, part[done:], begin + start + done)
        checks = list(region.checks)
        checks[slot] = check.intdigest()
        region.checks = (checks[0], checks[1])

    def read_now(self, region: Region, slot: int, view: memoryview) -> None:
        check = xxh3_64()
        begin = region.offset + slot * region.size
        for start in range(0, region.size, AT_ONCE):
            part = view[start : start + AT_ONCE]
            done = 0
            while done < len(part):
                got = os.preadv(self.file, [part[done:]], begin + start + done)
                if not got:
                    raise Mistake(
                        f"{self.path} is shorter than it was: {region.name} is not in it any more; {self.cure(region, slot)}"
                    )
                done += got
            check.update(part)
        if check.intdigest() != region.checks[slot]:
            raise Mistake(
                f"{region.name} in {self.path} is not what was written there (its checksum differs): the disk or somebody "
                f"changed it; {self.cure(region, slot)}"
            )

    def cure(self, region: Region, slot: int) -> str:
        """Advice about a damaged slot. If the last checkpoint uses it, training can't resume and the file is set
        aside."""
        if all(other.pinned is None for other in self.regions.values()):
            return "the same command begins anew"
        if slot != region.pinned:
            return "the last checkpoint does not stand on that, and the same command goes on from there"
        with self.lock:  # several threads may find damage at the same time
            if self.path is not None and not self.aside:
                self.aside = next(
                    path for path in map(f"{self.path}.damaged-{{}}".format, count()) if not os.path.exists(path)
                )
                self.path.rename(self.aside)
        return (
            f"the last checkpoint stands on that, so the run can't go on: the file is kept aside as {self.aside} (delete it if you "
            f"need the room), and the same command begins anew"
        )

    # Checkpoint state

    def settle(self) -> None:
        """Wait until everything written is on the disk."""
        for region in self.regions.values():
            if region.pending is not None:
                wait_for_transfer(region.pending)
                region.pending = None
        if self.file >= 0:
            os.fdatasync(self.file)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            region.name: [region.offset, region.size, region.current, region.checks[region.current]]
            for region in self.regions.values()
            if region.written and region.lasting
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here = {region.name: [region.offset, region.size] for region in self.regions.values()}
        if any(here.get(name) != entry[:2] for name, entry in state.items()):
            raise Mistake(
                f"{self.path} was laid out for another model, optimizer or plan: give what it was begun with, another --run, "
                f"or --fresh"
            )
        for region in self.regions.values():
            _, _, slot, check = state.get(region.name, (0, 0, 0, 0))
            region.current, region.written = slot, region.name in state
            region.pinned = slot if region.written else None
            region.checks = (check, 0) if slot == 0 else (0, check)

    def pin(self) -> None:
        """The state that `state_dict` returned last is safe in a checkpoint: do not overwrite its slots."""
        for region in self.regions.values():
            region.pinned = region.current if region.written and region.lasting else None

    def close(self, wait: bool = True) -> None:
        if self.threads is not None:
            self.threads.shutdown(wait)
            os.close(self.file)
            self.threads = None

    def __del__(self) -> None:
        self.close(wait=False)  # a request holds a reference to this store, so none is left


def require_room(directory: Path, size: int, there: int = 0) -> None:
    """Refuse to begin where `size` bytes of state do not fit; `there` of them are on the disk already."""
    free = shutil.disk_usage(directory).free
    if size - there > free:
        raise Mistake(
            f"the state needs {bytes_text(size)} on the disk of {directory} (what is trained is there twice, so that a "
            f"crash leaves one whole) and {bytes_text(free)} are free: free some, or give a --run on another disk"
        )


class OnDisk(LivesOnDisk):
    """Run state that lives in a disk store."""

    store: DiskStore

    @property
    def bytes_moved(self) -> int:
        return self.store.moved

    @property
    def bytes_stored(self) -> int:
        return self.store.end

    @property
    def remark(self) -> str:
        if self.store.imagined or self.store.direct or not self.store.end:
            return ""
        return (
            f"the file system of {self.store.path or tempfile.gettempdir()} has no direct I/O: what is streamed also fills the "
            f"kernel's page cache, which other programs may miss"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"regions": self.store.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.store.load_state_dict(state["regions"])

    def note_saved(self) -> None:
        """A checkpoint with this state is safe on disk."""
        self.store.pin()


def wait_for_transfer(moving: Future[None]) -> None:
    try:
        moving.result()
    except OSError as error:
        raise Mistake(
            f"the state on disk could not be read or written: {error.strerror}; the last checkpoint is intact: repair the disk "
            f"and run the same command again"
        ) from error
