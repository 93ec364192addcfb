"""The disk store: a file that holds what does not fit in memory, in regions that are read ahead and written behind.

    region    a name and a fixed number of bytes, in whole pages; it has two slots in the file, or one if it is never written again
              after the first checkpoint (frozen weights) or no checkpoint stands on it (gradients that wait within a step)
    write     goes to the slot that no checkpoint stands on, so that a crash never meets a half-written state
    pin       a checkpoint was saved: what is current now is what it stands on
    check     every slot has a checksum (XXH3), made when it is written and compared whenever it is read

A checkpoint of what is stored here copies nothing: the slots change their roles. Bytes pass by direct I/O (O_DIRECT) where the file
system has it, so that the page cache takes no memory from others. `read` and `write` return at once: threads do the work, and a request
waits for the one before it on the same buffer or the same region. With fake tensors (a rehearsal) nothing moves, and bytes are counted.
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
from typing import Any, ClassVar

import torch
from torch import Tensor
from xxhash import xxh3_64

from shoestring.core.errors import Mistake
from shoestring.core.private import FakeTensor
from shoestring.core.regular import NotRegular, regular
from shoestring.core.run import RunState
from shoestring.core.units import bytes_text

PAGE = 4096  # bytes: offsets, sizes and addresses of direct I/O are multiples of it
AT_ONCE = 8 << 20  # bytes that are moved and checked at once
THREADS = 3


def pages(size: int) -> int:
    """A number of bytes in whole pages.

    >>> pages(1), pages(4096), pages(4097)
    (4096, 4096, 8192)
    """
    return -(-size // PAGE) * PAGE


class AlignedBuffer:
    """Memory that direct I/O can use (it begins at a page), and the request that uses it now."""

    def __init__(self, size: int, kind: Tensor) -> None:
        imagined = isinstance(kind, FakeTensor)
        whole = kind.new_empty(pages(size) + PAGE, dtype=torch.uint8, device="cpu")
        shift = 0 if imagined else -whole.data_ptr() % PAGE
        self.bytes = whole[shift : shift + pages(size)]
        self.view = None if imagined else memoryview(self.bytes.numpy())  # type: ignore[arg-type]
        self.pending: Future[None] | None = None

    def wait(self) -> None:
        """Until nothing moves to or from here."""
        if self.pending is not None:
            finished(self.pending)
            self.pending = None

    def part(
        self, begin: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor in the buffer, from a byte on."""
        flat = self.bytes[begin : begin + prod(shape) * dtype.itemsize].view(dtype)
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride, flat.storage_offset())


@dataclass
class Region:
    name: str
    offset: int  # of its first slot; the second follows
    size: int  # bytes of a slot
    slots: int = 2  # one: it is only written while no checkpoint stands on it
    lasting: bool = True  # it outlives a step, so a checkpoint stands on it
    current: int = 0  # the slot that was written last
    pinned: int | None = None  # the slot that the last checkpoint stands on
    checks: tuple[int, int] = (0, 0)  # checksum of each slot
    written: bool = False
    version: int = 0  # how often it was written
    pending: Future[None] | None = None


class DiskStore:
    """Regions in a file. `reserve` all of them, then `open`."""

    def __init__(self, path: Path | None, kind: Tensor) -> None:
        self.path = path  # None: a file without a name, gone when we are
        self.kind = kind  # an empty tensor; buffers are fake or real as it is
        self.imagined = isinstance(kind, FakeTensor)
        self.regions: dict[str, Region] = {}
        self.end = 0  # bytes of the file
        self.moved = 0  # bytes that were asked to move, both ways
        self.direct = True
        self.file = -1
        self.lock = Lock()
        self.aside = ""  # what the file is called now, if it was found to be damaged
        self.threads: ThreadPoolExecutor | None = None

    def reserve(self, name: str, size: int, slots: int = 2, lasting: bool = True) -> None:
        assert name not in self.regions, f"{name} is reserved already"
        self.regions[name] = Region(name, self.end, pages(size), slots, lasting)
        self.end += slots * pages(size)

    def open(self) -> None:
        """Reserve the room on disk; refused with what is missing before anything is written."""
        if self.imagined or self.threads is not None or not self.end:
            return
        directory = self.path.parent if self.path else Path(tempfile.gettempdir())
        there = self.path.stat().st_blocks * 512 if self.path and self.path.exists() else 0
        require_room(directory, self.end, there)
        self.file = self.opened(directory)
        try:
            os.posix_fallocate(self.file, 0, self.end)
        except OSError as error:
            raise Mistake(
                f"the state needs {bytes_text(self.end)} on the disk of {directory}, which could not be reserved: "
                f"{error.strerror}"
            ) from error
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk store")

    def opened(self, directory: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # who sent the folder may have put a link there
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
        """Begin to bring a region into a buffer, from a byte of it on (a multiple of a page)."""
        region = self.regions[name]
        self.moved += region.size
        slot = region.current
        before = region.pending
        self.request(buffer, before, lambda view: self.read_now(region, slot, view), begin, region.size)
        region.pending = buffer.pending

    def write(self, name: str, buffer: AlignedBuffer, begin: int = 0) -> None:
        """Begin to bring a buffer into a region; the buffer must not change until then."""
        region = self.regions[name]
        self.moved += region.size
        assert region.slots > 1 or region.pinned is None, f"{name} has one slot, and a checkpoint stands on it"
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

        def done() -> None:
            for other in (earlier, before):
                if other is not None:
                    other.result()
            work(view)

        buffer.pending = self.threads.submit(done)

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
        """What to do about a damaged slot. If the last checkpoint stands on it, there is none to go on from: the file is put aside."""
        if all(other.pinned is None for other in self.regions.values()):
            return "the same command begins anew"
        if slot != region.pinned:
            return "the last checkpoint does not stand on that, and the same command goes on from there"
        with self.lock:  # several threads may find damage at once
            if self.path is not None and not self.aside:
                self.aside = next(
                    path for path in map(f"{self.path}.damaged-{{}}".format, count()) if not os.path.exists(path)
                )
                self.path.rename(self.aside)
        return (
            f"the last checkpoint stands on that, so the run can't go on: the file is kept aside as {self.aside} (delete it if you "
            f"need the room), and the same command begins anew"
        )

    # What survives a restart

    def settle(self) -> None:
        """Until all that was written is on the disk."""
        for region in self.regions.values():
            if region.pending is not None:
                finished(region.pending)
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
        """What `state_dict` gave last is safe in a checkpoint: from now on it is not written over."""
        for region in self.regions.values():
            region.pinned = region.current if region.written and region.lasting else None

    def close(self, wait: bool = True) -> None:
        if self.threads is not None:
            self.threads.shutdown(wait)
            os.close(self.file)
            self.threads = None

    def __del__(self) -> None:
        self.close(wait=False)  # a request holds on to us, so none is left


def require_room(directory: Path, size: int, there: int = 0) -> None:
    """Refuse to begin where `size` bytes of state do not fit; `there` of them are on the disk already."""
    free = shutil.disk_usage(directory).free
    if size - there > free:
        raise Mistake(
            f"the state needs {bytes_text(size)} on the disk of {directory} (what is trained is there twice, so that a "
            f"crash leaves one whole) and {bytes_text(free)} are free: free some, or give a --run on another disk"
        )


class OnDisk(RunState):
    """A part of a run whose state is in a disk store."""

    on_disk: ClassVar[bool] = True
    store: DiskStore

    @property
    def moved(self) -> int:
        return self.store.moved

    @property
    def stored(self) -> int:
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

    def saved(self) -> None:
        """A checkpoint with this state is safe."""
        self.store.pin()


def finished(moving: Future[None]) -> None:
    try:
        moving.result()
    except OSError as error:
        raise Mistake(
            f"the state on disk could not be read or written: {error.strerror}; the last checkpoint is whole: mend the disk "
            f"and run the same command again"
        ) from error
