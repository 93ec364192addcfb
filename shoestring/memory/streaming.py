"""The engine of Stream: a run's weights are read from disk when they are needed, stepped, and written back.

A unit is a block, or a large module outside of all blocks: its weights are one region of the disk store. A few buffers in memory
are given to units in turns; the parameters of a unit in a buffer are views of it, those of the others are NaN of the right shape. Units
are computed again in backward, so between forward and backward nothing in the graph refers to a buffer.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.elementwise import ELEMENTWISE
from shoestring.core.errors import Mistake
from shoestring.core.private import own_parameters, storage_id_of
from shoestring.core.run import Run
from shoestring.measure.interception import Guard, instead, patched
from shoestring.memory.disk_store import Buffer, DiskStore, OnDisk
from shoestring.memory.offloaded_optimizer import SMALL, AccessOrder, BufferRing, OffloadedOptimizer
from shoestring.memory.recompute import Recorder
from shoestring.memory.row_split import RowSplit, can_be_split, rows_at_once

UNIT_BUFFERS = 3   # of units in memory at once: at work, read ahead, written behind
LINE = 64      # bytes: weights in a unit begin at a multiple of it
NAME = "stream.bin"


class Unit:
    """A part of the model whose weights are read and written together."""

    def __init__(self, name: str, module: nn.Module, members: Mapping[str, nn.Parameter]) -> None:
        self.name, self.module = name, module
        self.members = dict(members)
        self.layout: dict[str, tuple[int, tuple[int, ...]]] = {}   # name of a weight -> offset, strides
        self.size = 0
        for one, parameter in self.members.items():
            self.layout[one] = (self.size, parameter.stride() if dense(parameter) else contiguous_strides(parameter))
            self.size += -(-parameter.numel() * parameter.element_size() // LINE) * LINE
        self.buffer: Buffer | None = None        # that it has now
        self.awaited: set[nn.Parameter] = set()  # those whose gradient is still to come in this step
        self.replayed = False                    # its backward has begun
        self.evicted = False                     # it left memory since its backward began
        self.loaded = False                      # its parameters are views of the buffer
        self.dirty = False                       # they were stepped and not written yet

    def in_buffer(self, one: str) -> Tensor:
        """A weight in the buffer."""
        assert self.buffer is not None, "only what is in memory has a buffer"
        offset, stride = self.layout[one]
        return self.buffer.part(offset, self.members[one].dtype, self.members[one].shape, stride)


class Streaming(OnDisk):
    """A run whose weights move between disk and memory."""

    def __init__(self, run: Run, coded: bool) -> None:
        parameters = list(run.model.parameters())
        self.device = parameters[0].device
        self.plain = run
        self.store = DiskStore(run.folder / NAME if run.folder else None, parameters[0].data.new_empty(0))
        self.names = {parameter: name for name, parameter in reversed(list(run.model.named_parameters(remove_duplicate=False)))}
        units, self.split_modules = laid_out(run, self.names)
        self.units = {unit.name: unit for unit in units}
        self.unit_of = {parameter: unit for unit in units for parameter in unit.members.values()}
        for unit in units:
            self.store.reserve(unit.name, unit.size)
        split_weights = dict.fromkeys(self.split_modules.values())
        self.row_splits = {weight: RowSplit(weight, self.names[weight], self.store) for weight in split_weights}
        trained = {parameter: self.names[parameter] for group in run.optimizer.param_groups for parameter in group["params"]
                   if parameter.requires_grad and parameter in self.names   # what is trained beside the model stays in memory
                   and (parameter.numel() >= SMALL or parameter in self.row_splits)}
        rows = {weight: rows_at_once(weight) for weight in self.row_splits}
        self.offloaded = OffloadedOptimizer(run.optimizer, self.store, trained, rows, coded)
        self.store.open()
        self.unit_buffers = [self.store.buffer(max(unit.size for unit in units)) for _ in range(UNIT_BUFFERS)] if units else []
        self.order: list[Unit] = []                 # those in memory, longest unused first
        # Of split weights, and of their gradients: those only where a weight is used twice, so memory for them is taken when they come
        self.rings = [BufferRing(self.store, self.widest, now) for now in (True, False)] if self.row_splits else []
        for one in self.row_splits.values():
            one.connect(self.rings[0], self.rings[1], self.offloaded)
        self.accesses = AccessOrder([unit.name for unit in units] + [unit.name for unit in reversed(units[:-1])])
        self.recorder = Recorder({unit.name: unit.module for unit in units}, tuple((number,) for number in range(len(units))))
        self.backward = False
        self.checked = False
        self.absent = {parameter: missing(parameter) for parameter in (*self.unit_of, *self.row_splits)}
        self.move_to_disk(write=not run.resumed)
        optimizer = cast(torch.optim.Optimizer, self.offloaded)
        self.run = replace(run, optimizer=optimizer, forward=self.forward, gradients=self.gradients, usable=self.usable,
                           state={**run.state, "stream": self})

    @property
    def widest(self) -> int:
        return max(one.rows * weight.shape[1] * weight.element_size() for weight, one in self.row_splits.items())

    # Weights are read and written

    def move_to_disk(self, write: bool) -> None:
        """Free the memory of the model's weights; with `write`, write them to disk first (a resumed run has them there)."""
        for unit in self.units.values():
            if write:
                self.take_buffer(unit).wait()
            for one, parameter in unit.members.items():
                if write:
                    unit.in_buffer(one).copy_(parameter.data)
                parameter.data = self.absent[parameter]
            if write:
                self.write_back(unit)
        for weight, split in self.row_splits.items():
            if write:
                split.fill(weight.data)
            weight.data = self.absent[weight]

    def take_buffer(self, unit: Unit) -> Buffer:
        """Give a unit a buffer that is free, or the one that was used longest ago."""
        if len(self.order) == len(self.unit_buffers):
            self.evict(self.order.pop(0))
        unit.buffer = next(free for free in self.unit_buffers if all(other.buffer is not free for other in self.order))
        self.order.append(unit)
        return unit.buffer

    def evict(self, unit: Unit) -> None:
        if unit.dirty:
            self.write_back(unit)
        for parameter in unit.members.values():
            parameter.data = self.absent[parameter]
        unit.evicted |= unit.replayed
        unit.buffer, unit.loaded = None, False

    def load(self, unit: Unit) -> None:
        """Have a unit's weights in memory, and those of the next unit being read."""
        ahead = self.accesses.next_after(unit.name, 1)
        self.start_reading(unit)
        for other in ahead:
            if self.units[other] is not unit:
                self.start_reading(self.units[other])
                self.order.remove(unit)
                self.order.append(unit)
        assert unit.buffer is not None, "start_reading gave it one"
        if not unit.loaded:
            unit.buffer.wait()
            unit.loaded = True
            for one, parameter in unit.members.items():
                value = unit.in_buffer(one)
                parameter.data = value if self.device.type == "cpu" else value.to(self.device, non_blocking=True)
        if self.backward:
            unit.replayed = True

    def start_reading(self, unit: Unit) -> None:
        """Start to read a unit that is not in memory; mark it as the one used last."""
        if unit.buffer is None:
            self.store.read(unit.name, self.take_buffer(unit))
        else:
            self.order.remove(unit)
            self.order.append(unit)

    # The parts that the loop calls

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, the model can be called: its weights load when they are needed."""

        def loading(unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                self.load(unit)
                return forward(*args, **kwargs)

            return called

        with self.plain.usable():
            whole = {unit.module: loading(unit, unit.module.forward) for unit in self.units.values()}
            split = {module: instead(module, self.row_splits[weight].forward_of(module)) for module, weight in self.split_modules.items()}
            with patched({**whole, **split}):
                yield

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)   # it would keep a copy of every weight
        try:
            with self.usable(), self.recorder.around(), self.guard():
                return self.plain.forward(model, batch)
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """The first time, notice code that uses a weight outside of the module it belongs to."""
        if self.checked:
            yield
            return
        absent = {storage_id_of(value): self.names[parameter] for parameter, value in self.absent.items()}
        with Guard(lambda leaf: absent.get(storage_id_of(leaf), ""), "plan without Stream"):
            yield
        self.checked = True

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        self.accesses.begin_step()
        self.offloaded.begin_step()
        for ring in self.rings:
            ring.accesses.begin_step()
        for unit in self.units.values():
            unit.awaited = {parameter for parameter in unit.members.values() if parameter.requires_grad}
            unit.replayed = unit.evicted = False
        hooks = [parameter.register_post_accumulate_grad_hook(self.ready) for parameter in self.unit_of if parameter.requires_grad]

        def loss(output: Any, piece: Batch) -> Tensor:
            value = now.loss(output, piece)
            self.backward = True
            return value

        try:
            value = self.plain.gradients(replace(now, loss=loss), batch)
            for unit in self.units.values():
                if unit.dirty:   # some of its weights took no part
                    self.write_back(unit)
            for split in self.row_splits.values():
                split.flush()
            return value
        finally:
            self.backward = False
            for hook in hooks:
                hook.remove()

    def ready(self, parameter: Tensor) -> None:
        """A gradient is there: step."""
        assert isinstance(parameter, nn.Parameter), "hooks were given to parameters"
        unit = self.unit_of[parameter]
        if unit.evicted or unit.buffer is None:
            raise Mistake(f"the backward of {unit.name} runs in turns with that of more than {UNIT_BUFFERS - 1} other blocks: the model is "
                          f"not a chain of blocks, and Stream can't be used for it")
        unit.buffer.wait()
        self.offloaded.step_one(parameter)
        parameter.grad = None
        if self.device.type != "cpu":
            unit.in_buffer(self.names[parameter]).copy_(parameter.data)
        unit.dirty = True
        unit.awaited.discard(parameter)
        if not unit.awaited:
            unit.replayed = False
            self.write_back(unit)

    def write_back(self, unit: Unit) -> None:
        assert unit.buffer is not None, "what was stepped is in memory"
        unit.dirty = False
        self.store.write(unit.name, unit.buffer)

    # What survives a restart, and what a report says

    @property
    def kept(self) -> dict[str, DiskTensor]:
        """Weights by all their names in the model's state, read when they are asked for."""
        return {name: DiskTensor(self, parameter) for name, parameter in self.plain.model.named_parameters(remove_duplicate=False)
                if parameter in self.unit_of or parameter in self.row_splits}

    @property
    def buffers(self) -> list[Tensor]:
        rings = (*self.rings, *((self.offloaded.ring,) if self.offloaded.ring else ()))
        return [buffer.bytes for buffer in (*self.unit_buffers, *(buffer for ring in rings for buffer in ring.buffers))]

    def state_dict(self) -> dict[str, Any]:
        """Where everything lies, so that others can read the weights too."""
        return super().state_dict() | {"file": NAME, "weights": {
            name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape), "parts": one.parts()}
            for name, one in self.kept.items()}}


class DiskTensor:
    """A weight on disk, in a run that is going on."""

    def __init__(self, streaming: Streaming, parameter: nn.Parameter) -> None:
        self.streaming, self.parameter = streaming, parameter
        self.dtype, self.shape = parameter.dtype, parameter.shape

    def parts(self) -> list[list[Any]]:
        """Where it lies: of every part the region, the first byte, shape and strides."""
        split = self.streaming.row_splits.get(self.parameter)
        if split is not None:
            width = self.shape[1]
            return [[f"{split.name}[{number}]", 0, [end - begin, width], [width, 1]] for number, (begin, end) in enumerate(split.spans)]
        unit = self.streaming.unit_of[self.parameter]
        offset, stride = unit.layout[self.streaming.names[self.parameter]]
        return [[unit.name, offset, list(self.shape), list(stride)]]

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order, some at a time."""
        split = self.streaming.row_splits.get(self.parameter)
        if split is not None:
            for number in range(len(split.spans)):
                yield split.fetch(number).cpu().reshape(-1)
            return
        unit = self.streaming.unit_of[self.parameter]
        self.streaming.load(unit)
        yield self.parameter.detach().cpu().contiguous().reshape(-1)


def laid_out(run: Run, names: Mapping[nn.Parameter, str]) -> tuple[list[Unit], dict[nn.Module, nn.Parameter]]:
    """The model's units in the order they run, and the modules whose weight is split by rows, with that weight."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    inside: set[nn.Module] = set()
    for block in run.blocks.values():
        for parameter in block.parameters():
            owners.setdefault(parameter, []).append(block)
        inside.update(block.modules())
    outside = [module for module in run.model.modules() if module not in inside and own_parameters(module)]
    for module in outside:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    units = []
    for name, block in run.blocks.items():
        members = {names[parameter]: parameter for parameter in block.parameters() if len(owners[parameter]) == 1}
        if members:
            units.append(Unit(name, block, members))
    largest = max((unit.size for unit in units), default=0)
    split: dict[nn.Module, nn.Parameter] = {}
    for module in outside:
        large = {names[one]: one for one in module.parameters(recurse=False) if one.numel() >= SMALL}
        weight = module.weight if can_be_split(module) and isinstance(run.optimizer, ELEMENTWISE) else None
        if isinstance(weight, nn.Parameter) and names[weight] in large and all(map(can_be_split, owners[weight])) and (
                len(owners[weight]) > 1 or weight.numel() * weight.element_size() > largest):
            split[module] = weight
        elif large and all(len(owners[one]) == 1 for one in large.values()) and not list(module.children()):
            name = next(name for name, other in run.model.named_modules() if other is module)
            units.append(Unit(name, module, large))
    return in_order(run.model, units), split


def in_order(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Units as they stand in the module tree."""
    positions = {module: number for number, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: positions[unit.module])


def dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers fill a stretch of memory."""
    size = 1
    for stride, side in sorted((stride, side) for stride, side in zip(tensor.stride(), tensor.shape, strict=True) if side > 1):
        if stride != size:
            return False
        size *= side
    return True


def contiguous_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()


def missing(parameter: nn.Parameter) -> Tensor:
    """What stands for a weight that is not in memory: its shape, and no number that could be mistaken for one."""
    return parameter.data.new_full((), float("nan")).expand(parameter.shape)
