"""OffloadActivations: write activations to disk in the forward pass and prefetch them in the backward pass.

    kept     sum_i a_i  ->  the blocks that are not offloaded, and two blocks in flight
    traffic  + 2 sum a_i over the offloaded blocks
    time     max(compute + t / cores, t) with t = traffic / disk speed: writes trail and reads run ahead by one block, and
             on a CPU the copying takes its share of the cores

What is in memory, and for how long, depends only on the program, never on the speed of the disk: a block's tensors are
freed when the next block's forward ends, and read back when the backward of the following block begins. On a GPU they
go to host memory.
Exact: the same bits come back. Rhu et al.: vDNN, 2016, arXiv 1602.08124.

Contract: How long a tensor lives depends on fixed points of the program, so it can be predicted
(tests/training/memory/offload/test_offload_activations.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import NO_BLOCK_RUNS, Ledger
from shoestring.core.costs.ledger_parts import Traffic, Trait
from shoestring.core.errors import Mistake
from shoestring.core.private import FakeTensor, storage_id, storage_id_of, write_count
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import MovesBytes, RunState
from shoestring.measure.interception import patch_forwards
from shoestring.training.memory.recompute.block_state import check_saving
from shoestring.training.technique import TrainingTechnique

SMALL = 1 << 14  # bytes: smaller tensors stay in memory


@dataclass(frozen=True)
class OffloadActivations(TrainingTechnique):
    """Keep activations on disk between forward and backward.

    Costs: two bytes of disk traffic for every byte offloaded, and a share of the cores for copying.

    Not for: slow or shared disks, where computing again (`Checkpoint`) is faster.
    """

    blocks: int = 0  # offload the first so many blocks, whose tensors wait longest; 0: all
    to: str = ""  # a directory on the disk to use; "": the system's temporary directory

    order: ClassVar[int] = 30
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    folders: ClassVar[tuple[str, ...]] = ("to",)
    why: ClassVar[str] = "activations wait on disk, not in memory"

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise Mistake(f"OffloadActivations(blocks={self.blocks}): give a number of blocks, or 0 for all")
        if self.to and not os.path.isdir(self.to):
            raise Mistake(f"OffloadActivations(to={self.to!r}): there is no such directory")

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[OffloadActivations, ...]:
        count = len(ledger.inside)
        return (cls(), *(cls(blocks=count * k // 4) for k in (1, 2, 3) if count * k // 4 > 0)) if count > 1 else ()

    @classmethod
    def settings_to_explain(cls, ledger: Ledger) -> tuple[OffloadActivations, ...]:
        return cls.choices(ledger) or (cls(),)

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has(Trait.NO_DISK):
            return ledger.findings.reasons[Trait.NO_DISK]
        return NO_BLOCK_RUNS if ledger.has(Trait.NO_BLOCK_RUNS) else ""

    def cost(self, ledger: Ledger) -> Ledger:
        inside = [position for position, block in enumerate(ledger.blocks) if block.inside]
        spilled = set(inside[: self.blocks or None])
        moved = 0.0
        blocks = list(ledger.blocks)
        for position in sorted(spilled):
            block = ledger.blocks[position]
            inner = block.kept - block.output
            moved += inner
            before = max((p for p in spilled if p < position), default=None)
            ahead = 0.0 if before is None else ledger.blocks[before].kept - ledger.blocks[before].output
            blocks[position] = replace(
                block,
                kept=block.output,
                rise=block.rise + ahead,
                spike=block.spike + inner + ahead,
                spilled=inner,
                ahead=ahead,
            )
        traffic = 2 * moved * ledger.pieces
        compute = ledger.pieces * sum(block.forward + block.backward for block in blocks)
        moving = traffic * ledger.machine.per_byte_spilled
        waiting = max(compute + moving / ledger.machine.cores, moving) - compute
        return replace(
            ledger,
            blocks=tuple(blocks),
            allocation=ledger.allocation.with_more(traffic / 2),
            traffic=ledger.traffic + Traffic(disk=traffic, disk_seconds=moving, waiting=waiting),
        )

    def apply(self, run: Run) -> Run:
        chosen = list(run.blocks.values())[: self.blocks or None]
        spool = ActivationFile(self.to or tempfile.gettempdir())

        def forward(model: nn.Module, batch: Batch) -> Any:
            spool.own = {storage_id_of(parameter) for parameter in model.parameters()}
            spool.rewind()
            with patch_forwards({block: spool.wrapper(block.forward) for block in chosen}):
                output = run.forward(model, batch)
            spool.settle()
            return output

        return replace(run, forward=forward, state={**run.state, "spill": spool})


class OffloadedStorage:
    """One tensor storage that is being written, is on disk, or is being read back."""

    def __init__(self, size: int, offset: int) -> None:
        self.size, self.offset = size, offset
        self.bytes: Tensor | None = None  # while it is in memory
        self.version = 0  # the tensor's version when it was saved, to detect in-place changes
        self.host: Tensor | None = None  # a GPU tensor's copy in host memory
        self.imagined = False  # in a rehearsal: there are no bytes to move
        self.moving: Future[None] | None = None
        self.uses = 0  # saved tensors that still need it


class ActivationFile(RunState, MovesBytes):
    """The file and all transfers between it and memory. Nothing in it outlives a step."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.own: set[int] = set()  # storages of weights, which are not offloaded
        self.file = -1
        self.asked = 0  # bytes of all requests, reads and writes
        self.threads: ThreadPoolExecutor | None = None
        self.rewind()

    def rewind(self) -> None:
        """A forward begins: write the file from its start again."""
        self.end = 0
        self.blocks: list[list[OffloadedStorage]] = []  # per block that ran, its parcels
        self.known: dict[int, tuple[OffloadedStorage, Any]] = {}

    def wrapper(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def spilling(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            check_saving("OffloadActivations", (args, kwargs))
            self.blocks.append([])
            number = len(self.blocks) - 1
            with saved_tensors_hooks(lambda tensor: self.pack(tensor, number), self.unpack):
                output = forward(*args, **kwargs)
            if number:
                self.let_go(number - 1)
            return output

        return spilling

    def pack(self, tensor: Tensor, number: int) -> Any:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage_id(storage) in self.own or storage.nbytes() < SMALL:
            return tensor
        parcel = self.parcel(tensor, number)
        parcel.uses += 1
        return parcel, number, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def parcel(self, tensor: Tensor, number: int) -> OffloadedStorage:
        """The parcel of a tensor's storage; a storage shared by several tensors is written once."""
        storage = tensor.untyped_storage()
        if storage_id(storage) in self.known:
            return self.known[storage_id(storage)][0]
        parcel = OffloadedStorage(storage.nbytes(), self.end)
        self.end += -(-parcel.size // 4096) * 4096
        self.asked += parcel.size
        whole = tensor.detach().as_strided((parcel.size // tensor.element_size(),), (1,), 0)
        parcel.bytes, parcel.version = whole, write_count(whole)
        if whole.is_cuda:
            parcel.host = to_host(whole)
        elif isinstance(whole, FakeTensor):
            parcel.imagined = True
        else:
            parcel.moving = self.pool().submit(self.write, parcel)
        self.known[storage_id(storage)] = (parcel, storage)
        self.blocks[number].append(parcel)
        return parcel

    def let_go(self, number: int) -> None:
        """Free the memory of a block's parcels, which are on disk now."""
        for parcel in self.blocks[number]:
            if parcel.moving is not None:
                wait_for_transfer(parcel.moving)
            assert parcel.bytes is None or write_count(parcel.bytes) == parcel.version, (
                "a tensor that backward needs was changed in place after it was saved"
            )
            parcel.moving = parcel.bytes = None
        gone = [address for address, (parcel, _) in self.known.items() if parcel.bytes is None]
        for address in gone:
            del self.known[address]

    def settle(self) -> None:
        """The forward is over: forget which storages are shared."""
        if self.blocks:
            self.let_go(len(self.blocks) - 1)
        self.known.clear()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parcel, number, dtype, shape, stride, offset = packed
        self.fetch(number)
        if number:
            self.fetch(number - 1)
        if parcel.bytes is None:  # needed a second time
            self.read_back(parcel)
        if parcel.moving is not None:
            wait_for_transfer(parcel.moving)
            parcel.moving = None
        tensor: Tensor = parcel.bytes.view(dtype).as_strided(shape, stride, offset)
        parcel.uses -= 1
        if parcel.uses == 0:
            parcel.bytes = None
        return tensor

    def fetch(self, number: int) -> None:
        """Start to read a block's parcels back, once."""
        waiting, self.blocks[number] = self.blocks[number], []
        for parcel in waiting:
            if parcel.uses:
                self.read_back(parcel)

    def read_back(self, parcel: OffloadedStorage) -> None:
        self.asked += parcel.size
        if parcel.host is not None:
            parcel.bytes = parcel.host.to("cuda", non_blocking=True).view(torch.uint8)
            return
        parcel.bytes = torch.empty(parcel.size, dtype=torch.uint8)
        if not parcel.imagined:
            parcel.moving = self.pool().submit(self.read, parcel)

    @property
    def bytes_moved(self) -> int:
        return self.asked

    def pool(self) -> ThreadPoolExecutor:
        if self.threads is None:
            try:
                self.holder = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 (unnamed: it disappears with the process)
            except OSError as error:
                raise Mistake(
                    f"activations can't be spilled to {self.directory}: {error.strerror}; choose another directory with "
                    f"OffloadActivations(to=...), or plan without OffloadActivations"
                ) from error
            self.file = self.holder.fileno()
            self.threads = ThreadPoolExecutor(2, thread_name_prefix="spill")
        return self.threads

    # Threads get the parcel, not its tensor: a thread may keep its arguments alive a little longer than its work.

    def write(self, parcel: OffloadedStorage) -> None:
        view = whole_bytes(parcel)
        done = 0
        while done < parcel.size:
            done += os.pwrite(self.file, view[done:], parcel.offset + done)

    def read(self, parcel: OffloadedStorage) -> None:
        view = whole_bytes(parcel)
        done = 0
        while done < parcel.size:
            got = os.preadv(self.file, [view[done:]], parcel.offset + done)
            assert got > 0, "the spill file ended before the parcel did"
            done += got

    def __del__(self) -> None:
        if self.threads is not None:
            self.threads.shutdown(wait=False)
            self.holder.close()


def whole_bytes(parcel: OffloadedStorage) -> memoryview:
    assert parcel.bytes is not None, "a parcel that moves is in memory"
    return memoryview(parcel.bytes.view(torch.uint8).numpy())  # type: ignore[arg-type]


def to_host(source: Tensor) -> Tensor:
    """A copy in pinned host memory, made asynchronously; the stream order keeps the bytes right."""
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=not isinstance(source, FakeTensor))
    return host.copy_(source, non_blocking=True)


def wait_for_transfer(moving: Future[None]) -> None:
    try:
        moving.result()
    except OSError as error:
        raise Mistake(
            f"spilling activations failed: {error.strerror}; free space on the disk, choose another directory with "
            f"OffloadActivations(to=...), or plan without OffloadActivations"
        ) from error
