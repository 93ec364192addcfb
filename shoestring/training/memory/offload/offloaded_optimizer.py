"""An optimizer whose moments are on disk: a step streams them through memory in chunks and calls the user's own
optimizer on each.

    moments in memory    all of them  ->  a few chunks, and those of small parameters
    traffic              + 2 x their bytes per step

A chunk of a parameter is passed to the optimizer as if it were a parameter of its own. For elementwise optimizers the
result for a number depends only on that number, its gradient and its moments, so the bits are the same; other
optimizers get whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.optimization.stepping import StepDivision, only, parameter_like
from shoestring.core.running.run import Run
from shoestring.training.memory.offload.disk_store import AlignedBuffer, DiskStore
from shoestring.training.memory.optimizers import eight_bits

SMALL = 1 << 14  # numbers: moments of smaller parameters stay in memory
CHUNK = 4 << 20  # numbers per chunk
BUFFERS = 4  # at most so many buffers of one chunk each: one at work, the others being read or written


def offload_refusal(ledger: Ledger, coded: bool) -> str:
    """Why moments can't be streamed in chunks, or kept in 8 bits; empty if they can."""
    if ledger.has(Trait.SPARSE_GRADIENTS):
        return "the model has sparse gradients, which can't be stepped a chunk at a time: make its embeddings with sparse=False"
    return (
        "the model has complex weights, whose moments have no 8-bit code"
        if coded and ledger.has(Trait.COMPLEX_WEIGHTS)
        else ""
    )


def in_parts(run: Run) -> bool:
    """Whether a part of a weight can be stepped without the rest (an elementwise optimizer)."""
    return not run.stepping().why_not(StepDivision.IN_PARTS)


class AccessOrder:
    """The order of region reads in the previous step, used to read ahead.

    Reads outside of a step (in a validation) are not part of that order.
    """

    def __init__(self, guess: Sequence[str] = ()) -> None:
        self.before, self.now = list(guess), list[str]()  # names read in the previous step, and in this one so far
        self.outside = False  # whether reads happen outside of a step now

    def begin_step(self) -> None:
        if self.now:
            self.before, self.now = self.now, []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While inside, reads count as outside of a step."""
        before, self.outside = self.outside, True
        try:
            yield
        finally:
            self.outside = before

    def next_after(self, name: str, count: int) -> list[str]:
        """Note that `name` is read; return the `count` names that followed it last time, or none if this step took
        another order."""
        if self.outside:  # a forward, in the order of the step's forward
            known = self.now or self.before
            at = known.index(name) if name in known else len(known)
            return known[at + 1 : at + 1 + count]
        at = len(self.now)
        self.now.append(name)
        return self.before[at + 1 : at + 1 + count] if self.before[at : at + 1] == [name] else []


class BufferRing:
    """A few buffers that regions pass through, with read-ahead in the order of the previous step. Together they are
    never larger than all regions: one buffer would be enough, the others let the disk work in parallel."""

    def __init__(self, store: DiskStore, sizes: Mapping[str, int], allocate_now: bool = True) -> None:
        self.store, self.sizes = store, dict(sizes)  # name of a region -> bytes
        self.buffers: list[AlignedBuffer] = []
        if allocate_now:  # else when the first region is read
            self.allocate()
        self.given = 0  # buffers handed out so far, round robin
        self.last: tuple[str, AlignedBuffer | None] = ("", None)
        self.coming: dict[str, tuple[AlignedBuffer, int]] = {}  # region -> its buffer, its version then
        self.accesses = AccessOrder()

    def fetch(self, name: str) -> AlignedBuffer:
        """The buffer with a region's bytes, valid until another region is fetched; undefined bytes if nothing was
        written yet."""
        buffer = self.last[1]
        if name == self.last[0] and buffer is not None:
            buffer.wait()
            return buffer
        regions = self.store.regions
        ahead = self.accesses.next_after(name, max(self.count - 2, 0))
        buffer, version = self.coming.pop(name, (None, -1))
        if buffer is None or version != regions[name].version:  # not read ahead, or rewritten since
            self.coming.clear()
            buffer = self.begin(name, regions[name].written)
        self.last = (name, buffer)
        for other in ahead:
            if other not in self.coming:
                self.coming[other] = (self.begin(other, regions[other].written), regions[other].version)
        buffer.wait()
        return buffer

    def blank(self, name: str) -> AlignedBuffer:
        """A buffer for a region's next content; the caller fills it."""
        buffer = self.begin(name, read=False)
        self.last = (name, buffer)
        buffer.wait()
        return buffer

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While inside, regions are read outside of a step; the next step's read-ahead is not disturbed."""
        before = self.last[0]
        with self.accesses.aside():
            yield
        self.coming.clear()
        if before and before != self.last[0]:
            self.last = (before, self.begin(before, self.store.regions[before].written))

    @property
    def count(self) -> int:
        """Number of buffers, once they are allocated."""
        return min(BUFFERS, max(sum(self.sizes.values()) // max(self.sizes.values()), 1))

    def allocate(self) -> None:
        self.buffers = [self.store.buffer(max(self.sizes.values())) for _ in range(self.count)]

    def begin(self, name: str, read: bool) -> AlignedBuffer:
        if not self.buffers:
            self.allocate()
        self.given += self.buffers[self.given % self.count] is self.last[1]  # skip the buffer in use
        buffer = self.buffers[self.given % self.count]
        self.given += 1
        self.coming = {
            other: one for other, one in self.coming.items() if one[0] is not buffer
        }  # its previous content is gone
        if read:
            self.store.read(name, buffer)
        return buffer


@dataclass(frozen=True)
class Chunk:
    """A range of a parameter's numbers, and the region that holds its moments."""

    region: str
    begin: int
    end: int
    shape: tuple[int, ...]  # the parameter's if the chunk is all of it, else (count,)

    @property
    def count(self) -> int:
        return self.end - self.begin

    def size(self, moments: Mapping[str, torch.dtype], coded: bool) -> int:
        """Bytes of its moments."""
        return sum(eight_bits.size(self.count) if coded else self.count * dtype.itemsize for dtype in moments.values())

    def views(self, buffer: AlignedBuffer, moments: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The moments in a buffer, by name."""
        found, begin = {}, 0
        for name, dtype in moments.items():
            found[name] = buffer.part(begin, dtype, self.shape)
            begin += self.count * dtype.itemsize
        return found

    def codes(self, buffer: AlignedBuffer, moments: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The bytes of the moments' 8-bit codes in a buffer, by name."""
        each = eight_bits.size(self.count)
        return {name: buffer.bytes[number * each : (number + 1) * each] for number, name in enumerate(moments)}


class OptimizerProxy:
    """Stands in for an optimizer; attributes that a subclass does not define are the optimizer's own."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class OffloadedOptimizer(OptimizerProxy):
    """Steps an optimizer's parameters; the moments of those in `names` are on disk.

    `elementwise`: parts of a parameter can be stepped without the rest. Parameters in `rows` are stepped that many rows
    at a time.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        store: DiskStore,
        names: Mapping[nn.Parameter, str],
        elementwise: bool,
        rows: Mapping[nn.Parameter, int] | None = None,
        coded: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self.store, self.coded = store, coded  # coded: moments in 8 bits
        self.group_of = {one: group for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
        self.moments = {
            (id(group), dtype): moments_of(optimizer, group, dtype)
            for group in optimizer.param_groups
            for dtype in dict.fromkeys(one.dtype for one in group["params"])
        }
        self.chunks: dict[nn.Parameter, list[Chunk]] = {}
        sizes: dict[str, int] = {}
        for parameter, name in names.items():
            moments = self.moments[id(self.group_of[parameter]), parameter.dtype]
            if not moments and parameter not in (rows or {}):
                continue
            self.chunks[parameter] = chunks(parameter, name, (rows or {}).get(parameter), elementwise)
            for chunk in self.chunks[parameter]:
                sizes[chunk.region] = chunk.size(moments, coded)
                store.reserve(chunk.region, sizes[chunk.region])
        self.ring = BufferRing(store, sizes) if any(sizes.values()) else None

    def begin_step(self) -> None:
        if self.ring is not None:
            self.ring.accesses.begin_step()

    def step(self) -> None:
        for group in list(self.optimizer.param_groups):
            for parameter in list(group["params"]):
                if parameter.grad is not None and parameter in self.chunks:
                    self.step_parameter(parameter)
        with without(self.optimizer, self.chunks):
            if any(
                parameter.grad is not None for group in self.optimizer.param_groups for parameter in group["params"]
            ):
                self.optimizer.step()

    def step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter as if there were no others; a parameter that the optimizer was not given is left alone."""
        if parameter not in self.group_of:
            return
        if parameter in self.chunks:
            self.step_parameter(parameter)
            return
        with torch.no_grad(), only(self.optimizer, parameter, self.group_of[parameter]):
            self.optimizer.step()

    def step_parameter(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "a parameter is stepped by its gradient"
        weights, gradient = flat_view(parameter.data), flat_view(parameter.grad, parameter.stride())
        for number, chunk in enumerate(self.chunks[parameter]):
            self.step_chunk(parameter, number, weights[chunk.begin : chunk.end], gradient[chunk.begin : chunk.end])
        self.finish(parameter)

    def step_chunk(self, parameter: nn.Parameter, number: int, weights: Tensor, gradient: Tensor) -> None:
        """Step one chunk, as a stand-in parameter of the user's optimizer; `weights` are changed in place. Runs on the
        host."""
        chunk, group = self.chunks[parameter][number], self.group_of[parameter]
        moments = self.moments[id(group), parameter.dtype]
        known = self.store.regions[chunk.region].written
        buffer = self.ring.fetch(chunk.region) if moments and self.ring else None
        stand_in = parameter_like(parameter, weights.to("cpu").view(chunk.shape))
        stand_in.grad = gradient.to("cpu").view(chunk.shape)
        views: dict[str, Tensor] = {}
        if buffer and not self.coded:
            views = chunk.views(buffer, moments)
        elif buffer and known:
            views = {
                name: eight_bits.unpack(held, chunk.count, name in eight_bits.SQUARES).view(chunk.shape)
                for name, held in chunk.codes(buffer, moments).items()
            }
        if known:
            rest = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in self.optimizer.state[parameter].items()
            }
            self.optimizer.state[stand_in] = rest | views
        with torch.no_grad(), only(self.optimizer, stand_in, group):
            self.optimizer.step()
            after = self.optimizer.state.pop(stand_in, {})
            if buffer and self.coded:
                for name, held in chunk.codes(buffer, moments).items():
                    eight_bits.pack(after[name], held, name in eight_bits.SQUARES)
            else:
                for name, view in views.items():
                    if after.get(name) is not view:
                        view.copy_(after[name].view(chunk.shape))
            if weights.device.type != "cpu":
                weights.copy_(stand_in.view(-1))
        if buffer:
            self.store.write(chunk.region, buffer)
        self.after = {name: value for name, value in after.items() if name not in moments}

    def finish(self, parameter: nn.Parameter) -> None:
        """All chunks of a parameter were stepped."""
        self.optimizer.state[parameter] = self.after


def chunks(parameter: nn.Parameter, name: str, rows: int | None, elementwise: bool) -> list[Chunk]:
    """A parameter in chunks of CHUNK numbers, or of `rows` rows, or as one chunk."""
    count = parameter.numel()
    if rows is None and not elementwise:
        return [Chunk(f"moments of {name}", 0, count, tuple(parameter.shape))]
    size = CHUNK if rows is None else rows * parameter.shape[1]
    return [
        Chunk(f"moments of {name}[{number}]", begin, min(begin + size, count), (min(size, count - begin),))
        for number, begin in enumerate(range(0, count, size))
    ]


def moments_of(optimizer: optim.Optimizer, group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Names and dtypes of the optimizer's state that has the parameter's shape; found by stepping a small parameter."""
    probe = parameter_like(group["params"][0], torch.zeros(2, 3, dtype=dtype))
    with only(optimizer, probe, group):
        for _ in range(2):
            probe.grad = torch.ones_like(probe)
            optimizer.step()
    state = optimizer.state.pop(probe, {})
    return {
        name: value.dtype for name, value in state.items() if isinstance(value, Tensor) and value.shape == probe.shape
    }


def flat_view(tensor: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """A dense tensor's numbers as a flat view in memory order, or in the order of these strides."""
    stride = tensor.stride() if stride is None else stride
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers fill contiguous memory, in any order of dimensions."""
    size = 1
    for stride, side in sorted(
        (stride, side) for stride, side in zip(tensor.stride(), tensor.shape, strict=True) if side > 1
    ):
        if stride != size:
            return False
        size *= side
    return True


def strides_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Strides of a parameter, and so of its gradient: its own if it is dense, else contiguous."""
    return parameter.stride() if dense(parameter) else torch.empty(parameter.shape, device="meta").stride()


@contextmanager
def without(optimizer: optim.Optimizer, others: Mapping[nn.Parameter, Any]) -> Iterator[None]:
    """While inside, the optimizer does not know of `others`."""
    members = [group["params"] for group in optimizer.param_groups]
    for group, all_of_them in zip(optimizer.param_groups, members, strict=True):
        group["params"] = [parameter for parameter in all_of_them if parameter not in others]
    try:
        yield
    finally:
        for group, all_of_them in zip(optimizer.param_groups, members, strict=True):
            group["params"] = all_of_them
