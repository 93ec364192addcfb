"""The tracker: logs every tensor storage, real or fake, when it is allocated and freed, with the moment of the step.

Everything we say about memory is computed from this log afterwards: the peak, the block and phase in which it occurs,
what it consists of, and what an allocator makes of it. Storages are told apart by identity, so views and in-place
results count once, and a storage is freed when its last reference is.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from shoestring.core.batch import Batch, tensors
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.files.codec import from_json
from shoestring.core.private import (
    BATCH_NORMS,
    WATCHING,
    DispatchMode,
    arguments_of,
    dense_parts,
    has_memory,
    next_node_number,
    node_number,
    operation_of,
    storage_id,
    tree_leaves,
)
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import KeepsAverages, LivesOnDisk
from shoestring.core.user_code.blame import failure_text
from shoestring.measure.calls import holds_cache
from shoestring.measure.fake import WORKSPACES, Stage
from shoestring.measure.holdings import Holders


class Moment(NamedTuple):
    """A position in a step."""

    phase: str  # "forward", "backward", "update", VALIDATE, or "" between steps
    block: str  # name of the block; "" for code outside of all blocks


VALIDATE = "validate"  # the phase of a validation, which is not part of a step


class StorageEvent(NamedTuple):
    storage: int  # serial number
    bytes: int  # positive: allocated with that size; negative: freed


@dataclass(frozen=True)
class LogJson:
    """The JSON form of a log; its fields are those of `Log`."""

    events: list[tuple[int, int]]
    marks: list[tuple[int, tuple[str, str]]]
    roles: list[tuple[int, str]]
    outputs: dict[str, list[int]]
    workspaces: list[int]
    flops: list[tuple[tuple[str, str], int | float]]
    draws: bool
    mixes: bool
    moved: list[int]
    sent: list[int]
    stored: int
    blocks: list[str]
    traits: list[str]
    validation_flops: float
    unvalidated: str


@dataclass
class Log:
    events: list[StorageEvent] = field(default_factory=list)
    marks: list[tuple[int, Moment]] = field(default_factory=list)  # (events so far, the moment that begins)
    roles: dict[int, str] = field(default_factory=dict)  # storage -> "parameters", "gradients", ...
    outputs: dict[str, list[int]] = field(default_factory=dict)  # block -> storages of its latest output
    workspaces: set[int] = field(default_factory=set)  # storages that a library allocates for itself
    flops: Counter[Moment] = field(default_factory=Counter)  # operations, over all steps
    draws: bool = False  # whether a random operation was seen
    mixes: bool = False  # whether a layer mixes samples (batch norm)
    moved: list[int] = field(default_factory=list)  # per step, bytes to and from the disk
    sent: list[int] = field(default_factory=list)  # per step, bytes to other workers
    stored: int = 0  # bytes of state on the disk
    blocks: list[str] = field(default_factory=list)  # names of the model's blocks, whether they ran or not
    traits: set[str] = field(default_factory=set)  # of weights and gradients: "complex weights", "sparse gradients"
    validation_flops: float = 0.0  # operations of the validation after the steps, not included in `flops`
    unvalidated: str = ""  # why that validation ended early, or was left out

    def as_json(self) -> dict[str, Any]:
        return {
            "events": self.events,
            "marks": self.marks,
            "roles": list(self.roles.items()),
            "outputs": self.outputs,
            "workspaces": sorted(self.workspaces),
            "moved": self.moved,
            "sent": self.sent,
            "stored": self.stored,
            "flops": [(list(moment), count) for moment, count in self.flops.items()],
            "draws": self.draws,
            "mixes": self.mixes,
            "blocks": self.blocks,
            "traits": sorted(self.traits),
            "validation_flops": self.validation_flops,
            "unvalidated": self.unvalidated,
        }

    @classmethod
    def from_json(cls, data: Any) -> Log:
        told = from_json(LogJson, data)
        return cls(
            [StorageEvent(*event) for event in told.events],
            [(position, Moment(*moment)) for position, moment in told.marks],
            dict(told.roles),
            told.outputs,
            set(told.workspaces),
            Counter({Moment(*moment): count for moment, count in told.flops}),
            told.draws,
            told.mixes,
            told.moved,
            told.sent,
            told.stored,
            told.blocks,
            set(told.traits),
            told.validation_flops,
            told.unvalidated,
        )

    def moments(self) -> Iterator[tuple[Moment, list[StorageEvent]]]:
        """The log in consecutive parts of one moment each."""
        starts = [(0, Moment("", "")), *self.marks, (len(self.events), Moment("", ""))]
        for (start, moment), (stop, _) in pairwise(starts):
            yield moment, self.events[start:stop]


class Tracker(DispatchMode):
    """A dispatch mode that writes to `log`. `hold` counts tensors that existed before; `watch_run` reports the position
    in the step.

    If it observes a training that must go on (`forgiving`), a failure of the tracker itself is noted in `failed`, and
    tracking stops.
    """

    def __init__(self, stage: Stage | None = None, forgiving: bool = False) -> None:
        super().__init__()
        self.forgiving = forgiving
        self.failed = ""  # what failed and where, as text: the exception itself would keep tensors alive
        self.stage = stage  # fakes the operations; None: they run for real
        self.log = Log()
        self.serials: dict[int, tuple[int, int, Any]] = {}  # storage address -> serial, bytes, weak reference
        self.count = self.made = 0  # storages seen so far, and before the first step
        self.weightless: set[int] = set()  # serials of storages that take no memory
        self.moment = Moment("", "")
        self.places: list[tuple[int, str]] = []  # (first autograd node, the place whose forward made it)
        self.visits: Counter[str] = Counter()

    def __enter__(self) -> Tracker:
        WATCHING.append(self.look_at)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        WATCHING.remove(self.look_at)

    def look(self, work: Callable[..., object], *given: Any) -> None:
        """Do some of the tracker's own work, whose failure must not stop training."""
        if self.failed:
            return
        try:
            work(*given)
        except Exception as error:
            if not self.forgiving or isinstance(error, MemoryError):
                raise
            self.failed = failure_text(error)

    def look_at(self, tensor: Tensor) -> None:
        self.look(self.see, tensor)

    def mark(self, phase: str, block: str = "") -> None:
        self.made = self.made if self.log.marks else self.count
        if phase != self.moment.phase:
            self.see_sizes()
        self.moment = Moment(phase, block)
        self.log.marks.append((len(self.log.events), self.moment))

    def begin(self) -> None:
        """A forward begins."""
        self.visits.clear()
        self.enter("(start)")

    def enter(self, place: str) -> None:
        """The forward enters a place: a block, or code between two. A second visit is a place of its own."""
        self.visits[place] += 1
        visit = self.visits[place]
        name = place if visit == 1 else f"{place}#{visit}"
        self.places.append((next_node_number(), name))
        self.mark("forward", name)

    def leave(self, output: Any) -> None:
        name = self.moment.block
        self.log.outputs[name] = [
            self.see(part) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) for part in dense_parts(leaf)
        ]
        self.enter(f"(after {name})")

    def hold(self, held: Iterable[Tensor], role: str = "") -> None:
        for tensor in held:
            for part in dense_parts(tensor):
                serial = self.see(part)
                if role and self.log.roles.get(serial, "data") == "data":  # data become inputs when they are trained on
                    self.log.roles[serial] = role

    def hold_new(self, held: Iterable[tuple[Tensor, str]]) -> None:
        """Count dense tensors with their roles; tensors that were allocated in a step keep theirs."""
        for tensor, role in held:
            known = self.count
            serial = self.see(tensor)
            if serial > known or serial <= self.made or not self.log.marks:
                self.log.roles.setdefault(serial, role)

    def alive(self, role: str) -> bool:
        """Whether a tensor with this role is alive."""
        return any(self.log.roles.get(serial) == role for serial, _, _ in self.serials.values())

    @contextmanager
    def holding(self, held: Iterable[Tensor], role: str) -> Iterator[None]:
        """Count tensors while inside, even if their owner keeps them for longer."""
        new: list[tuple[int, int]] = []

        def begin() -> None:
            for tensor in held:
                for part in dense_parts(tensor):
                    address = storage_id(part.untyped_storage())
                    if address not in self.serials:
                        new.append((address, self.see(part)))
                        self.log.roles.setdefault(new[-1][1], role)

        def end() -> None:
            for address, serial in new:
                known = self.serials.get(address)
                if known is not None and known[0] == serial:
                    del self.serials[address]
                    self.note(serial, -known[1])

        self.look(begin)
        yield
        self.look(end)

    def workspace(self, tensor: Tensor) -> None:
        """A library allocated this for itself."""
        self.log.workspaces.add(self.see(tensor))

    def see(self, tensor: Tensor) -> int:
        """The serial number of a tensor's storage, new or known; a resized storage is logged."""
        storage = tensor.untyped_storage()
        address, size = storage_id(storage), storage.nbytes()
        known = self.serials.get(address)
        if known is not None:
            serial, before, reference = known
            if size != before:
                self.note(serial, size - before)
                self.serials[address] = (serial, size, reference)
            return serial
        self.count += 1
        serial = self.count
        if not has_memory(tensor):
            self.weightless.add(serial)
        self.note(serial, size)

        def note_death(_: Any) -> None:
            known = self.serials.get(address)
            if (
                known is not None and known[0] == serial
            ):  # else it was released, and another storage may have its address
                del self.serials[address]
                self.note(serial, -known[1])

        self.serials[address] = (serial, size, weakref.ref(storage, note_death))
        return serial

    def see_arguments(self, values: Iterable[Any]) -> None:
        """See the arguments of an operation. Nearly all are known; tensors that the job hides count from their first
        use on."""
        for value in values:
            if isinstance(value, Tensor):
                self.hold((value,))
            elif isinstance(value, (tuple, list)):
                self.see_arguments(value)

    def note(self, serial: int, change: int) -> None:
        if change and serial not in self.weightless:
            self.log.events.append(StorageEvent(serial, change))

    def see_sizes(self) -> None:
        """Storages can be resized without an operation, so now and then all are checked."""
        for address, (serial, before, reference) in list(self.serials.items()):
            storage = reference()
            if storage is not None and (size := storage.nbytes()) != before:
                self.note(serial, size - before)
                self.serials[address] = serial, size, reference

    def find_place(self) -> None:
        """In backward, the running autograd node tells whose backward this is."""
        number = node_number()
        if number is not None and self.places:
            name = self.places[bisect_right(self.places, (number, chr(0x10FFFF))) - 1][1]
            if self.moment != ("backward", name):
                self.mark("backward", name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        self.look(self.find_place)
        self.look(self.see_arguments, (*args, *kwargs.values()))
        out = func(*args, **kwargs) if self.stage is None else self.stage.perform(func, args, kwargs)
        self.look(self.see_result, func, args, kwargs, out)
        return out

    def see_result(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """See the results of an operation, and count its floating-point operations."""
        for leaf in (out,) if isinstance(out, Tensor) else () if out is None else tree_leaves(out):
            if isinstance(leaf, Tensor):
                for part in dense_parts(leaf):
                    self.see(part)
        if func in WORKSPACES and out[WORKSPACES[func]] is not None:  # there is none in evaluation
            self.workspace(out[WORKSPACES[func]])
        count = flop_registry.get(operation_of(func))
        if self.moment.phase == VALIDATE:
            self.log.validation_flops += count(*args, **kwargs, out_val=out) if count is not None else 0
            return
        if count is not None:
            self.log.flops[self.moment] += count(*args, **kwargs, out_val=out)
        if not self.log.draws and torch.Tag.nondeterministic_seeded in func.tags:
            self.log.draws = really_draws(func, args, kwargs)


def really_draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random operation really draws; attention without dropout does not."""
    names = [argument.name for argument in arguments_of(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def watch_run(run: Run, tracker: Tracker, holders: Holders) -> Run:
    """The same run, reporting its position in the step to the tracker. Tensors of `holders` are counted when a step
    begins."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        tracker.look(tracker.begin)
        with (
            note_caches(run, tracker.log.traits),
            report_visits(
                run,
                lambda name: tracker.look(tracker.enter, name),
                lambda name, output: tracker.look(tracker.leave, output),
            ),
        ):
            return run.forward(model, batch)

    def gradients(now: Run, batch: Batch) -> Tensor:
        tracker.look(lambda: tracker.hold(tensors(batch), "inputs"))
        tracker.look(lambda: tracker.hold_new(holders.find(run)))
        return run.gradients(now, batch)

    def update(now: Run) -> None:
        tracker.look(see_gradients, now, tracker)
        tracker.look(tracker.mark, "update")
        run.update(now)
        tracker.look(lambda: tracker.hold(state_tensors(now.optimizer), "optimizer"))
        tracker.look(tracker.mark, "")

    tracker.look(see_model, run, tracker)
    tracker.look(hold_run, run, tracker)
    return replace(run, forward=forward, gradients=gradients, update=update)


@contextmanager
def report_visits(run: Run, enter: Callable[[str], None], leave: Callable[[str, Any], None]) -> Iterator[None]:
    """While inside, `enter` gets the name of every block whose forward begins, and `leave` its name and output."""

    def note_exit(name: str, output: Any) -> None:  # must return None, or the hook would replace the output
        leave(name, output)

    hooks = [
        hook
        for name, block in run.blocks.items()
        for hook in (
            block.register_forward_pre_hook(lambda module, args, name=name: enter(name)),
            block.register_forward_hook(lambda module, args, output, name=name: note_exit(name, output)),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def note_caches(run: Run, traits: set[str]) -> Iterator[None]:
    """While inside, note as a trait that a block is given a key-value cache."""

    def look(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if holds_cache((args, tuple(named.values()))):
            traits.add(Trait.CACHES)

    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in run.blocks.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def see_gradients(run: Run, tracker: Tracker) -> None:
    gradients = [p.grad for p in (*run.model.parameters(), *stepped_tensors(run)) if p.grad is not None]
    tracker.log.traits |= {Trait.SPARSE_GRADIENTS for gradient in gradients if gradient.layout is not torch.strided}
    tracker.hold(gradients, "gradients")


def see_model(run: Run, tracker: Tracker) -> None:
    """Note the tensors that a model consists of."""
    tracker.log.mixes = any(isinstance(part, BATCH_NORMS) for part in run.model.modules())
    tracker.log.blocks = list(run.blocks)
    tracker.log.traits |= {Trait.COMPLEX_WEIGHTS for parameter in run.model.parameters() if parameter.is_complex()}


def hold_run(run: Run, tracker: Tracker) -> None:
    """Count the tensors that a run holds."""
    tracker.hold((*run.model.parameters(), *stepped_tensors(run)), "parameters")
    tracker.hold(run.model.buffers(), "buffers")
    tracker.hold((average for part in run.state_that(KeepsAverages) for average in part.averages.values()), "buffers")
    tracker.hold(state_tensors(run.optimizer), "optimizer")
    tracker.hold((buffer for part in run.state_that(LivesOnDisk) for buffer in part.buffers), "buffers of the disk")


def stepped_tensors(run: Run) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: the weights, or pieces of them."""
    return (parameter for group in run.optimizer.param_groups for parameter in group["params"])


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (leaf for state in optimizer.state.values() for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
