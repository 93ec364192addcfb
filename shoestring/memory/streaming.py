"""The engine of Stream: a run's weights come from a shelf when they are needed, are stepped there, and go back.

A unit is a block, or a large module outside of all blocks: its weights lie together and come and go together. A few desks in memory are
given to units in turns; the parameters of a unit at a desk are views of it, those of the others are NaN of the right shape. Units are
computed again in backward, so between forward and backward nothing in the graph refers to a desk.
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
from shoestring.core.run import Run
from shoestring.measure.interception import Guard, patched
from shoestring.memory.disk_store import Buffer, OnDisk, Shelf
from shoestring.memory.offloaded_optimizer import SMALL, Habit, Parked, Ring
from shoestring.memory.recompute import Recorder
from shoestring.memory.row_split import Cut, can_be_cut, rows_of

DESKS = 3      # at work, read ahead, written behind
LINE = 64      # bytes: weights in a unit begin at a multiple of it
NAME = "stream.bin"


class Unit:
    """A part of the model whose weights come and go together."""

    def __init__(self, name: str, module: nn.Module, members: Mapping[str, nn.Parameter]) -> None:
        self.name, self.module = name, module
        self.members = dict(members)
        self.places: dict[str, tuple[int, tuple[int, ...]]] = {}   # name of a weight -> offset, strides
        self.size = 0
        for one, parameter in self.members.items():
            self.places[one] = (self.size, parameter.stride() if dense(parameter) else contiguous_strides(parameter))
            self.size += -(-parameter.numel() * parameter.element_size() // LINE) * LINE
        self.desk: Buffer | None = None
        self.left: set[nn.Parameter] = set()     # those whose gradient is still to come
        self.replayed = False                    # its backward has begun
        self.lost = False                        # it left memory since
        self.seated = False                      # its parameters are the weights in the buffer
        self.dirty = False                       # they were stepped and not written yet

    def home(self, one: str) -> Tensor:
        """A weight in the buffer."""
        assert self.desk is not None, "only what is in memory has a home"
        offset, stride = self.places[one]
        return self.desk.part(offset, self.members[one].dtype, self.members[one].shape, stride)


class Streaming(OnDisk):
    """What moves: a run's weights between the shelf and memory."""

    def __init__(self, run: Run, coded: bool) -> None:
        parameters = list(run.model.parameters())
        self.device = parameters[0].device
        self.plain = run
        self.shelf = Shelf(run.folder / NAME if run.folder else None, parameters[0].data.new_empty(0))
        self.names = {parameter: name for name, parameter in reversed(list(run.model.named_parameters(remove_duplicate=False)))}
        units, self.cut_modules = laid_out(run, self.names)
        self.units = {unit.name: unit for unit in units}
        self.unit_of = {parameter: unit for unit in units for parameter in unit.members.values()}
        for unit in units:
            self.shelf.place(unit.name, unit.size)
        self.cuts = {weight: Cut(weight, self.names[weight], self.shelf) for weight in dict.fromkeys(self.cut_modules.values())}
        trained = {parameter: self.names[parameter] for group in run.optimizer.param_groups for parameter in group["params"]
                   if parameter.requires_grad and (parameter.numel() >= SMALL or parameter in self.cuts)}
        self.parked = Parked(run.optimizer, self.shelf, trained, {weight: rows_of(weight) for weight in self.cuts}, coded)
        self.shelf.open()
        self.desks = [self.shelf.buffer(max(unit.size for unit in units)) for _ in range(DESKS)] if units else []
        self.order: list[Unit] = []                 # those in memory, longest unused first
        # Of weights and of gradients, which pass only where a weight is used twice
        self.rings = [Ring(self.shelf, self.widest, at_once) for at_once in (True, False)] if self.cuts else []
        for one in self.cuts.values():
            one.connect(self.rings[0], self.rings[1], self.parked)
        self.habit = Habit([unit.name for unit in units] + [unit.name for unit in reversed(units[:-1])])
        self.recorder = Recorder({unit.name: unit.module for unit in units}, tuple((number,) for number in range(len(units))))
        self.backward = False
        self.checked = False
        self.absent = {parameter: nowhere(parameter) for parameter in (*self.unit_of, *self.cuts)}
        self.stock(fresh=not run.resumed)
        optimizer = cast(torch.optim.Optimizer, self.parked)
        self.run = replace(run, optimizer=optimizer, forward=self.forward, gradients=self.gradients, usable=self.usable,
                           state={**run.state, "stream": self})

    @property
    def widest(self) -> int:
        return max(one.rows * weight.shape[1] * weight.element_size() for weight, one in self.cuts.items())

    # Weights come and go

    def stock(self, fresh: bool) -> None:
        """Bring the model's weights to the shelf, and leave nothing of them in memory."""
        for unit in self.units.values():
            if fresh:
                self.take_desk(unit).wait()
            for one, parameter in unit.members.items():
                if fresh:
                    unit.home(one).copy_(parameter.data)
                parameter.data = self.absent[parameter]
            if fresh:
                self.write_back(unit)
        for weight, cut in self.cuts.items():
            if fresh:
                cut.stock(weight.data)
            weight.data = self.absent[weight]

    def take_desk(self, unit: Unit) -> Buffer:
        """Give a unit a desk that is free, or the one that was used longest ago."""
        if len(self.order) == len(self.desks):
            self.leave(self.order.pop(0))
        unit.desk = next(desk for desk in self.desks if all(other.desk is not desk for other in self.order))
        self.order.append(unit)
        return unit.desk

    def leave(self, unit: Unit) -> None:
        if unit.dirty:
            self.write_back(unit)
        for parameter in unit.members.values():
            parameter.data = self.absent[parameter]
        unit.lost |= unit.replayed
        unit.desk, unit.seated = None, False

    def come(self, unit: Unit) -> None:
        """Have a unit's weights in memory, and the next ones on their way."""
        ahead = self.habit.after(unit.name, 1)
        self.begin(unit)
        for other in ahead:
            if self.units[other] is not unit:
                self.begin(self.units[other])
                self.order.remove(unit)
                self.order.append(unit)
        assert unit.desk is not None, "it was given one"
        if not unit.seated:
            unit.desk.wait()
            unit.seated = True
            for one, parameter in unit.members.items():
                parameter.data = unit.home(one) if self.device.type == "cpu" else unit.home(one).to(self.device, non_blocking=True)
        if self.backward:
            unit.replayed = True

    def begin(self, unit: Unit) -> None:
        """Begin to read a unit that is not in memory."""
        if unit.desk is None:
            self.shelf.read(unit.name, self.take_desk(unit))
        else:
            self.order.remove(unit)
            self.order.append(unit)

    # The parts that the loop calls

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, the model can be called: its weights come when they are needed."""

        def coming(unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                self.come(unit)
                return forward(*args, **kwargs)

            return called

        whole = {unit.module: coming(unit, unit.module.forward) for unit in self.units.values()}
        cut = {module: self.cuts[weight].forward_of(module) for module, weight in self.cut_modules.items()}
        with patched({**whole, **cut}):
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
        absent = {value.untyped_storage()._cdata: self.names[parameter] for parameter, value in self.absent.items()}
        with Guard(lambda leaf: absent.get(leaf.untyped_storage()._cdata, ""), "plan without Stream"):
            yield
        self.checked = True

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        self.habit.turn()
        self.parked.turn()
        for ring in self.rings:
            ring.habit.turn()
        for unit in self.units.values():
            unit.left = {parameter for parameter in unit.members.values() if parameter.requires_grad}
            unit.replayed = unit.lost = False
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
            for cut in self.cuts.values():
                cut.flush()
            return value
        finally:
            self.backward = False
            for hook in hooks:
                hook.remove()

    def ready(self, parameter: Tensor) -> None:
        """A gradient is there: step."""
        assert isinstance(parameter, nn.Parameter), "hooks were given to parameters"
        unit = self.unit_of[parameter]
        if unit.lost or unit.desk is None:
            raise Mistake(f"the backward of {unit.name} runs in turns with that of more than {DESKS - 1} other blocks: the model is not a "
                          f"chain of blocks, and Stream can't be used for it")
        unit.desk.wait()
        self.parked.step_one(parameter)
        parameter.grad = None
        if self.device.type != "cpu":
            unit.home(self.names[parameter]).copy_(parameter.data)
        unit.dirty = True
        unit.left.discard(parameter)
        if not unit.left:
            unit.replayed = False
            self.write_back(unit)

    def write_back(self, unit: Unit) -> None:
        assert unit.desk is not None, "what was stepped is in memory"
        unit.dirty = False
        self.shelf.write(unit.name, unit.desk)

    # What survives a restart, and what is told

    @property
    def kept(self) -> dict[str, Shelved]:
        """Weights by all their names in the model's state, read when they are asked for."""
        return {name: Shelved(self, parameter) for name, parameter in self.plain.model.named_parameters(remove_duplicate=False)
                if parameter in self.unit_of or parameter in self.cuts}

    @property
    def buffers(self) -> list[Tensor]:
        rings = (*self.rings, *((self.parked.ring,) if self.parked.ring else ()))
        return [buffer.bytes for buffer in (*self.desks, *(buffer for ring in rings for buffer in ring.buffers))]

    def state_dict(self) -> dict[str, Any]:
        """Where everything lies, so that others can read the weights too."""
        return super().state_dict() | {"file": NAME, "weights": {
            name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape), "parts": one.parts()}
            for name, one in self.kept.items()}}


class Shelved:
    """A weight on the shelf."""

    def __init__(self, streaming: Streaming, parameter: nn.Parameter) -> None:
        self.streaming, self.parameter = streaming, parameter
        self.dtype, self.shape = parameter.dtype, parameter.shape

    def parts(self) -> list[list[Any]]:
        """Where it lies: of every part the region, the first byte, shape and strides."""
        cut = self.streaming.cuts.get(self.parameter)
        if cut is not None:
            width = self.shape[1]
            return [[f"{cut.name}[{number}]", 0, [end - begin, width], [width, 1]] for number, (begin, end) in enumerate(cut.spans)]
        unit = self.streaming.unit_of[self.parameter]
        offset, stride = unit.places[self.streaming.names[self.parameter]]
        return [[unit.name, offset, list(self.shape), list(stride)]]

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order, some at a time."""
        cut = self.streaming.cuts.get(self.parameter)
        if cut is not None:
            for number in range(len(cut.spans)):
                yield cut.fetch(number).cpu().reshape(-1)
            return
        unit = self.streaming.unit_of[self.parameter]
        self.streaming.come(unit)
        yield self.parameter.detach().cpu().contiguous().reshape(-1)


def laid_out(run: Run, names: Mapping[nn.Parameter, str]) -> tuple[list[Unit], dict[nn.Module, nn.Parameter]]:
    """The model's units in the order they run, and the modules that are cut with their weights."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    inside: set[nn.Module] = set()
    for block in run.blocks.values():
        for parameter in block.parameters():
            owners.setdefault(parameter, []).append(block)
        inside.update(block.modules())
    outside = [module for module in run.model.modules() if module not in inside and module._parameters]
    for module in outside:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    units = []
    for name, block in run.blocks.items():
        members = {names[parameter]: parameter for parameter in block.parameters() if len(owners[parameter]) == 1}
        if members:
            units.append(Unit(name, block, members))
    largest = max((unit.size for unit in units), default=0)
    cut: dict[nn.Module, nn.Parameter] = {}
    for module in outside:
        large = {names[one]: one for one in module.parameters(recurse=False) if one.numel() >= SMALL}
        weight = module.weight if can_be_cut(module) and isinstance(run.optimizer, ELEMENTWISE) else None
        if isinstance(weight, nn.Parameter) and names[weight] in large and all(map(can_be_cut, owners[weight])) and (
                len(owners[weight]) > 1 or weight.numel() * weight.element_size() > largest):
            cut[module] = weight
        elif large and all(len(owners[one]) == 1 for one in large.values()) and not list(module.children()):
            name = next(name for name, other in run.model.named_modules() if other is module)
            units.append(Unit(name, module, large))
    return in_order(run.model, units), cut


def in_order(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Units as they stand in the module tree."""
    places = {module: number for number, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: places[unit.module])


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


def nowhere(parameter: nn.Parameter) -> Tensor:
    """What stands for a weight that is not in memory: its shape, and no number that could be mistaken for one."""
    return parameter.data.new_full((), float("nan")).expand(parameter.shape)
