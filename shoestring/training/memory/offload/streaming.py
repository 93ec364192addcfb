"""The engine of OffloadModel: reads a run's weights from disk when they are needed, steps them, and writes them back.

A unit is a block, or a large module outside of all blocks: its weights are one region of the disk store, and its frozen
weights another, which is never rewritten. Units take turns in a few buffers; the parameters of a unit in memory are
views of its buffer, those of the others are NaN with the right shape. Units are recomputed in backward, so between
forward and backward nothing in the graph refers to a buffer.

A weight is stepped when its gradient is there, in the backward of the batch's last micro-batch; gradients of earlier
micro-batches wait on disk. If the job clips, all of them wait until their norm is known, and the update brings every
unit through memory once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.private import storage_id_of
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import KeepsWeights
from shoestring.measure.interception import Guard, MemoryRanges, UpdatedGuard, instead, patch_forwards
from shoestring.training.memory.offload.disk_store import AlignedBuffer, DiskStore, OnDisk
from shoestring.training.memory.offload.offloaded_optimizer import (
    SMALL,
    AccessOrder,
    BufferRing,
    OffloadedOptimizer,
    in_parts,
)
from shoestring.training.memory.offload.row_split import RowSplit, rows_at_once
from shoestring.training.memory.offload.stream_units import StreamUnit, stream_units
from shoestring.training.memory.offload.waiting_gradients import WaitingGradients, clipping
from shoestring.training.memory.recompute.recompute import BlockRecorder

UNIT_BUFFERS = 3  # at most so many units in memory at once: one at work, one read ahead, one written behind
NAME = "stream.bin"
LAST = "in the backward that steps"  # of a batch's last micro-batch


class Streaming(OnDisk, KeepsWeights):
    """A run whose weights move between disk and memory."""

    def __init__(self, run: Run, coded: bool) -> None:
        parameters = list(run.model.parameters())
        self.device = parameters[0].device
        self.plain = run
        self.store = DiskStore(run.settings.file(NAME), parameters[0].data.new_empty(0))
        stepped = (parameter for group in run.optimizer.param_groups for parameter in group["params"])
        # The model's parameters, in its order, and parameters trained beside them (LowRank)
        self.trained = [parameter for parameter in dict.fromkeys((*parameters, *stepped)) if parameter.requires_grad]
        self.names = {
            parameter: name for name, parameter in reversed(list(run.model.named_parameters(remove_duplicate=False)))
        }
        units, self.split_modules = stream_units(run, self.names)
        self.units = {unit.name: unit for unit in units}
        self.unit_of = {parameter: unit for unit in units for parameter in unit.members.values()}
        for unit in units:
            for region, size in unit.sizes.items():
                self.store.reserve(region, size, slots=2 if unit.changes and region == unit.name else 1)
        split_weights = dict.fromkeys(self.split_modules.values())
        self.row_splits = {weight: RowSplit(weight, self.names[weight], self.store) for weight in split_weights}
        trained = {
            parameter: self.names[parameter]
            for group in run.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
            and parameter in self.names  # parameters trained beside the model stay in memory
            and (parameter.numel() >= SMALL or parameter in self.row_splits)
        }
        rows = {weight: rows_at_once(weight) for weight in self.row_splits}
        self.offloaded = OffloadedOptimizer(run.optimizer, self.store, trained, in_parts(run), rows, coded)
        self.clips = bool(run.settings.clip)  # then no weight is stepped in backward
        large = {
            parameter: self.names[parameter]
            for parameter in (*self.unit_of, *self.row_splits)
            if parameter.requires_grad and (parameter.numel() >= SMALL or parameter in self.row_splits)
        }
        self.waiting = WaitingGradients(self.store, large if self.clips or run.cuts.parts > 1 else {}, rows)
        self.store.open()
        sizes = sorted(unit.size for unit in units)
        self.unit_buffers = [
            self.store.buffer(size) for size in (sizes if len(units) <= UNIT_BUFFERS else sizes[-1:] * UNIT_BUFFERS)
        ]
        self.order: list[StreamUnit] = []  # units in memory, least recently used first
        # Buffers of split weights and of their gradients; the latter are needed for weights used twice: allocated on
        # demand
        ranges = {region: size for one in self.row_splits.values() for region, size in one.sizes.items()}
        self.rings = [BufferRing(self.store, ranges, now) for now in (True, False)] if self.row_splits else []
        for one in self.row_splits.values():
            one.connect(self.rings[0], self.rings[1], self.offloaded, self.waiting)
        self.accesses = AccessOrder([unit.name for unit in units] + [unit.name for unit in reversed(units[:-1])])
        self.recorder = BlockRecorder(
            {unit.name: unit.module for unit in units}, tuple((number,) for number in range(len(units))), leaving=True
        )
        self.backward = False  # whether a backward is running
        self.last = True  # whether this is the batch's last micro-batch
        self.stepping = False  # whether waiting gradients are being applied; frozen weights are not needed for that
        self.checked = set[str]()  # passes in which the model was found to use no missing weight
        self.updated = MemoryRanges()  # weights in memory that the running backward has updated
        self.absent = {parameter: missing(parameter) for parameter in (*self.unit_of, *self.row_splits)}
        self.move_to_disk(write=not run.settings.resumed)
        optimizer = cast(torch.optim.Optimizer, self.offloaded)
        self.run = replace(
            run,
            optimizer=optimizer,
            forward=self.forward,
            gradients=self.gradients,
            update=self.update,
            outside=replace(run.outside, usable=self.usable),
            state={**run.state, "stream": self},
        )

    # Weights move between disk and memory

    def move_to_disk(self, write: bool) -> None:
        """Free the memory of the model's weights; with `write`, write them to disk first (a resumed run has them
        there)."""
        for unit in self.units.values():
            if write:
                buffer = self.take_buffer(unit)
                buffer.wait()
            for one, parameter in unit.members.items():
                if write:
                    unit.in_buffer(one).copy_(parameter.data)
                parameter.data = self.absent[parameter]
            if write:
                for region, begin in unit.regions.items():
                    self.store.write(region, buffer, begin)
        for weight, split in self.row_splits.items():
            if write:
                split.fill(weight.data)
            weight.data = self.absent[weight]

    def take_buffer(self, unit: StreamUnit) -> AlignedBuffer:
        """Give a unit a free buffer, or the least recently used one; prefer the smallest that is large enough."""
        if len(self.order) == len(self.unit_buffers):
            self.evict(self.order.pop(0))
        unit.buffer = next(
            free
            for free in self.unit_buffers
            if free.bytes.numel() >= unit.size and all(other.buffer is not free for other in self.order)
        )
        self.order.append(unit)
        return unit.buffer

    def evict(self, unit: StreamUnit) -> None:
        if unit.dirty:
            self.write_back(unit)
        for parameter in unit.members.values():
            parameter.data = self.absent[parameter]
        unit.evicted |= unit.replayed
        if unit.buffer is not None:
            self.updated.drop_sharing(unit.buffer.bytes)
        unit.buffer, unit.loaded, unit.partial = None, False, False

    def drop(self, unit: StreamUnit) -> None:
        """Drop a unit from memory before it is its turn."""
        self.order.remove(unit)
        self.evict(unit)

    def load(self, unit: StreamUnit) -> None:
        """Bring a unit's weights into memory, and start to read the next unit's."""
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
                if unit.partial and not parameter.requires_grad:
                    continue
                value = unit.in_buffer(one)
                parameter.data = value if self.device.type == "cpu" else value.to(self.device, non_blocking=True)
        if self.backward:
            unit.replayed = True

    def start_reading(self, unit: StreamUnit) -> None:
        """Start to read a unit that is not in memory; mark it as most recently used."""
        if unit.partial and not self.stepping:
            self.drop(unit)
        if unit.buffer is None:
            buffer = self.take_buffer(unit)
            unit.partial = self.stepping and len(unit.regions) > 1
            for region, begin in unit.regions.items():
                if region == unit.name or not unit.partial:
                    self.store.read(region, buffer, begin)
        else:
            self.order.remove(unit)
            self.order.append(unit)

    # What the training loop calls

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, the model can be called outside of a step, any number of times. Afterwards memory is as it was,
        so the next step moves the same bytes as every step."""
        found = list(self.order)
        with self.aside(), self.loading():
            yield
            for unit in found:
                self.start_reading(unit)

    def guarding(self) -> AbstractContextManager[object]:
        return self.guard("outside of a step")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While inside, weights are read outside of a step."""
        with self.accesses.aside(), ExitStack() as stack:
            for ring in self.rings:
                stack.enter_context(ring.aside())
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While inside, a unit's weights are loaded when its module is called."""

        def loading(unit: StreamUnit, forward: Callable[..., Any]) -> Callable[..., Any]:
            def load_and_run(*args: Any, **kwargs: Any) -> Any:
                self.load(unit)
                return forward(*args, **kwargs)

            return load_and_run

        with self.plain.outside.usable():
            whole = {unit.module: loading(unit, unit.module.forward) for unit in self.units.values()}
            split = {
                module: instead(module, self.row_splits[weight].forward_of(module))
                for module, weight in self.split_modules.items()
            }
            with patch_forwards({**whole, **split}):
                yield

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # the cache would keep a copy of every weight
        try:
            with self.loading(), self.recorder.around(), self.guard("in a step"):
                return self.plain.forward(model, batch)
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """In the first pass of a kind, detect code that uses a weight outside of its own module."""
        if where in self.checked:
            yield
            return
        absent = {storage_id_of(value): self.names[parameter] for parameter, value in self.absent.items()}
        with (
            Guard(lambda leaf: absent.get(storage_id_of(leaf), ""), "plan without OffloadModel"),
            UpdatedGuard(self.updated, "OffloadModel"),
        ):
            yield
        self.checked.add(where)

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        self.accesses.begin_step()
        self.offloaded.begin_step()
        self.waiting.begin_step()
        for ring in self.rings:
            ring.accesses.begin_step()
        for split in self.row_splits.values():
            split.begin_step()
        hooks = [
            parameter.register_post_accumulate_grad_hook(self.ready)
            for parameter in self.unit_of
            if parameter.requires_grad
        ]

        def backward(part: Run, value: Tensor) -> None:
            self.begin_piece(part.last)
            with self.guard(
                LAST if self.last else "in a backward"
            ):  # a custom autograd function may call parts of a block there
                now.backward(part, value)
            for split in self.row_splits.values():
                split.flush()
            self.updated.clear()
            self.backward = False

        try:
            value = self.plain.gradients(replace(now, backward=backward), batch)
            if not self.clips:
                self.step_rest()
            return value
        finally:
            self.backward = False
            for hook in hooks:
                hook.remove()

    def begin_piece(self, last: bool) -> None:
        """The backward of a micro-batch begins."""
        self.backward, self.last = True, last
        for unit in self.units.values():
            unit.awaited = {parameter for parameter in unit.members.values() if parameter.requires_grad}
            unit.replayed = unit.evicted = False
        for split in self.row_splits.values():
            split.complete, split.steps, split.running = last, last and not self.clips, True

    def ready(self, parameter: Tensor) -> None:
        """A gradient is there: apply it, or let it wait."""
        assert isinstance(parameter, nn.Parameter), "hooks were given to parameters"
        unit = self.unit_of[parameter]
        if unit.evicted or unit.buffer is None:
            raise Mistake(
                f"the backward of {unit.name} runs in turns with that of more than {UNIT_BUFFERS - 1} other blocks: the model is "
                f"not a chain of blocks, and OffloadModel can't be used for it"
            )
        unit.buffer.wait()
        waits = self.clips or not self.last
        if parameter in self.waiting.spans:
            self.waiting.add_whole(parameter, keep=waits)
            if waits:
                assert parameter.grad is not None, "it has come"
                if self.last:
                    self.waiting.note_norm(parameter, parameter.grad)
                parameter.grad = None
        if not waits:
            self.step(parameter)
        unit.awaited.discard(parameter)
        if not unit.awaited:
            unit.replayed = False
            if unit.dirty:
                self.write_back(unit)

    def step(self, parameter: nn.Parameter) -> None:
        """Step a weight that is in memory by its gradient."""
        unit = self.unit_of[parameter]
        self.offloaded.step_one(parameter)
        parameter.grad = None
        if self.backward and LAST not in self.checked:
            self.updated.add(parameter, self.names[parameter])
        if self.device.type != "cpu":
            unit.in_buffer(self.names[parameter]).copy_(parameter.data)
        unit.dirty = True

    def step_rest(self, factor: Tensor | None = None) -> None:
        """Apply the gradients that still wait: all of them if the job clips, times `factor`."""
        self.stepping = True
        for unit in self.units.values():
            rest = [
                parameter
                for parameter in unit.members.values()
                if parameter in self.waiting.waiting or parameter.grad is not None
            ]
            if rest:
                self.load(unit)
            for parameter in rest:
                if parameter in self.waiting.waiting:
                    parameter.grad = self.waiting.whole(parameter)
                if factor is not None and parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))
                self.step(parameter)
            if unit.dirty:  # even if some of its weights got no gradient
                self.write_back(unit)
            if unit.partial and rest:
                self.drop(unit)
        self.stepping = False
        for split in self.row_splits.values():
            split.step_rest(factor)
        self.waiting.waiting.clear()

    def update(self, now: Run) -> None:
        """Step everything that was not stepped in backward: small weights outside of all units, and everything if the
        job clips."""
        if self.clips:
            with torch.no_grad():
                norm = self.waiting.norm(self.trained)
                now.noted.note_norm(norm)
                factor = clipping(norm, now.settings.clip)
                for parameter in self.trained:
                    if parameter.grad is not None and parameter not in self.unit_of:
                        parameter.grad.mul_(factor.to(parameter.grad.device))
                self.step_rest(factor)
        self.plain.update(replace(now, settings=replace(now.settings, clip=0.0)))

    def write_back(self, unit: StreamUnit) -> None:
        assert unit.buffer is not None, "a unit with stepped weights is in memory"
        unit.dirty = False
        self.store.write(unit.name, unit.buffer)

    # Checkpoint state and figures for the report

    @property
    def weights_elsewhere(self) -> dict[str, DiskTensor]:
        """The weights on disk, by all their names in the model's state dict; each is read when it is needed."""
        return {
            name: DiskTensor(self, parameter)
            for name, parameter in self.plain.model.named_parameters(remove_duplicate=False)
            if parameter in self.unit_of or parameter in self.row_splits
        }

    @property
    def buffers(self) -> list[Tensor]:
        rings = (*self.rings, *filter(None, (self.offloaded.ring, self.waiting.ring)))
        return [buffer.bytes for buffer in (*self.unit_buffers, *(buffer for ring in rings for buffer in ring.buffers))]

    def state_dict(self) -> dict[str, Any]:
        """Where every weight lies on disk, so that other programs can read them too."""
        return super().state_dict() | {
            "file": NAME,
            "weights": {
                name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape), "parts": one.parts()}
                for name, one in self.weights_elsewhere.items()
            },
        }


class DiskTensor:
    """A weight on disk, in a run that is still going."""

    def __init__(self, streaming: Streaming, parameter: nn.Parameter) -> None:
        self.streaming, self.parameter = streaming, parameter
        self.dtype, self.shape = parameter.dtype, parameter.shape

    def parts(self) -> list[list[Any]]:
        """Where it lies: for every part the region, first byte, shape and strides."""
        split = self.streaming.row_splits.get(self.parameter)
        if split is not None:
            width = self.shape[1]
            return [
                [f"{split.name}[{number}]", 0, [end - begin, width], [width, 1]]
                for number, (begin, end) in enumerate(split.spans)
            ]
        unit = self.streaming.unit_of[self.parameter]
        region, offset, stride = unit.place(self.streaming.names[self.parameter])
        return [[region, offset, list(self.shape), list(stride)]]

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order, a chunk at a time."""
        split = self.streaming.row_splits.get(self.parameter)
        if split is not None:
            for number in range(len(split.spans)):
                with self.streaming.rings[0].accesses.aside():
                    found = split.fetch(number)
                yield found.cpu().reshape(-1)
            return
        unit = self.streaming.unit_of[self.parameter]
        with self.streaming.accesses.aside():
            self.streaming.load(unit)
        yield self.parameter.detach().cpu().contiguous().reshape(-1)


def missing(parameter: nn.Parameter) -> Tensor:
    """A placeholder for a weight that is not in memory: its shape, filled with NaN so that it can't be mistaken for
    one."""
    return parameter.data.new_full((), float("nan")).expand(parameter.shape)
