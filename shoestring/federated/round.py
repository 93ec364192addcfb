"""A federated round: choose, order, work, send, combine, advance. Techniques replace these parts; the loop below never learns of one.

    server                                   devices (simulated ones, or real ones: two implementations of `Devices`)
    choose   who takes part
    order    what they are given   ------->  work     on their own records, from the weights they are given
                                             encode   what leaves the device
    decode   what arrived          <-------
    combine  one update of them all
    advance  the next weights

Work is done for several devices at once, a row of a matrix each, so a thousand simulated ones are a few matrix products. A real device
does the same with one row. What must survive a restart is in `ServerState.state`, and in `DeviceView.state` on the device.

Contract: What is kept is kept as tensors, saved with every checkpoint (tests/federated/test_kill.py). The rows of a
chunk never depend on how many processes there are (tests/federated/simulation/test_simulate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.local import Local
from shoestring.federated.combined_statistics import mean_statistics, wrong_statistics
from shoestring.federated.device_errors import counted_kinds
from shoestring.federated.layout import Layout
from shoestring.federated.randomness import SYSTEM, Randomness
from shoestring.federated.records import Records

Tensors = Mapping[str, Tensor]
NONE = Layout(())


@dataclass(frozen=True)
class ServerState:
    """What the server knows between two rounds."""

    seed: int
    round: int  # rounds that are done
    weights: Tensor  # (size) that are trained
    state: Tensors = field(default_factory=dict)  # of techniques, by name: moments, control variates, a clipping norm
    statistics: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # of norm layers: federated/statistics.py says what becomes of them
    drawn: Tensors = field(
        default_factory=dict
    )  # of this round alone, such as who takes part: a secret, which no file has

    @property
    def row(self) -> Tensor:
        """All numbers of the model."""
        return torch.cat([self.weights, self.statistics])


class DeviceGroup(NamedTuple):
    """Devices that begin from the same weights."""

    names: tuple[str, ...]
    age: int = 0  # rounds that have passed since those weights; 0: they are the newest


@dataclass(frozen=True)
class Order:
    """What a device is given."""

    seed: int
    round: int  # from 0
    weights: Tensor  # (size) that it begins from
    extras: Tensors = field(default_factory=dict)  # what techniques give along
    judges: bool = False  # the device is to measure its metrics before and after, too
    statistics: Tensor | None = None  # that it begins with; None: its own, or the job's initial ones

    @property
    def bytes(self) -> int:
        """That a device is given."""
        beside = () if self.statistics is None else (self.statistics,)
        return sum(one.numel() * one.element_size() for one in (self.weights, *self.extras.values(), *beside))


@dataclass(frozen=True)
class DeviceView:
    """A device, seen from itself."""

    records: Records
    state: dict[str, Tensor] = field(default_factory=dict)  # what techniques keep on it between rounds; it never leaves

    @property
    def name(self) -> str:
        return self.records.name


@dataclass(frozen=True)
class Objective:
    """What devices minimise while they work: their own loss, and, where techniques say so, that they stay near an anchor.

    gradient of a step  =  gradient of the loss  +  pull (w - anchor)  +  correction
    """

    local: Local
    start: Tensor | None = None  # (k, size): where each begins; None: at the weights it was given
    pull: float = 0.0
    anchor: Tensor | None = None  # (size)
    correction: Tensor | None = None  # (k, trained)
    model: str = ""  # a further model of the devices, whose statistics are kept by this name


Sums = Mapping[str, tuple[float, float]]  # of a metric: the sum over samples of value x weight, and the sum of weights


@dataclass(frozen=True)
class Updates:
    """What k devices found, a row each."""

    names: tuple[str, ...]
    rows: Tensor  # (k, size): weights after the work minus those before it
    counts: Tensor  # (k) float64: samples that each trained on
    losses: Tensor  # (k) float64: mean training loss of its steps
    extras: Tensors = field(default_factory=dict)  # (k, ...) each: what techniques send along
    before: tuple[Sums, ...] = ()  # metrics of every device on what it holds out, if it was to measure them,
    after: tuple[Sums, ...] = ()  # before its work and after
    age: int = 0  # of the weights that they began from, as in `Group`; it is not sent
    statistics: Tensor | None = None  # (k, ...) after the work, not differences; None: they are not sent

    def some(self, keep: Sequence[int]) -> Updates:
        """The updates of a few of them."""
        rows = torch.tensor(list(keep), dtype=torch.long)
        return Updates(
            tuple(self.names[one] for one in keep),
            self.rows[rows],
            self.counts[rows],
            self.losses[rows],
            {name: value[rows] for name, value in self.extras.items()},
            tuple(self.before[one] for one in keep) if self.before else (),
            tuple(self.after[one] for one in keep) if self.after else (),
            self.age,
            None if self.statistics is None else self.statistics[rows],
        )


@dataclass(frozen=True)
class Sent:
    """What k devices send: their updates without the rows, and the payload that stands for the rows."""

    told: Updates  # rows are empty: (k, 0)
    payload: Tensors  # (k, ...) each

    @property
    def bytes(self) -> int:
        """That each of them sends: the payload, its statistics, what techniques send along, and its count of samples and its loss."""
        beside = () if self.told.statistics is None else (self.told.statistics,)
        tensors = (*self.payload.values(), *self.told.extras.values(), *beside, self.told.counts, self.told.losses)
        return sum(one[0].numel() * one.element_size() for one in tensors)


@dataclass(frozen=True)
class Rejected:
    """A device whose update can't be used."""

    name: str
    why: str  # in words of ours, never a text that a device made (device_errors)


@dataclass(frozen=True)
class Arrived:
    """What became of the devices of one chunk."""

    sent: Sent | None  # None: nobody of them answered
    missing: tuple[str, ...] = ()  # who did not answer,
    rejected: tuple[Rejected, ...] = ()  # and whose work failed
    seconds: float = 0.0  # simulated: when the last of them had answered, since the round began
    restored: tuple[str, ...] = ()  # who keeps the state of before, because the new one is not finite


class Devices(Protocol):
    """The devices, as the server sees them."""

    def work(
        self, order: Order, names: Sequence[str]
    ) -> Iterator[Arrived]: ...  # in an order that follows from the names alone


@dataclass(frozen=True)
class Combined:
    """One update of all that arrived."""

    update: Tensor  # (size)
    state: Tensors = field(default_factory=dict)  # of the server's, that techniques of `combine` change
    weight: float = 0.0  # of all that are in it


Choose = Callable[[ServerState, "Population"], Sequence[DeviceGroup]]
MakeOrder = Callable[[ServerState, DeviceGroup], Order]
Work = Callable[[Order, Sequence[DeviceView], Objective], Updates]
Encode = Callable[[Order, Sequence[DeviceView], Updates], Sent]
Decode = Callable[[Order, Sent], Updates]
Combine = Callable[[ServerState, Iterable[Updates]], Combined]
Advance = Callable[[ServerState, Combined], ServerState]
Settle = Callable[
    [Layout, Tensor, Tensor], Tensor
]  # statistics (k, s) of devices and their counts (k) -> the server's (s)
Note = Callable[
    [Tensors, Updates, "Population"], Tensors
]  # the server's state so far -> with one more chunk of updates


@dataclass(frozen=True)
class Population:
    """Who could take part, and how many do."""

    count: int  # devices
    name: Callable[[int], str]  # of the n-th
    per_round: int


@dataclass(frozen=True)
class Round:
    layout: Layout  # of the weights that are trained
    local: Local
    choose: Choose
    order: MakeOrder
    work: Work  # on devices
    encode: Encode  # on devices
    decode: Decode
    combine: Combine
    advance: Advance
    initial: Callable[[ServerState], ServerState] = lambda server: (
        server
    )  # the server before the first round, with the state of techniques
    begin: Callable[[ServerState, Population], ServerState] = lambda server, population: (
        server
    )  # before `choose`: state that needs the population
    note: Note = lambda state, updates, population: (
        state
    )  # what the server keeps of all that arrives, however it is combined
    answers: Callable[[Order, str], bool] = lambda order, name: True  # simulated devices: whether one answers at all,
    duration: Callable[[Order, str], float] = lambda order, name: (
        1.0
    )  # and after how long, in units of the median device's time
    initial_weights: Tensor | None = None  # (size): every device can make them itself, from the job and its seed
    statistics: Layout = NONE  # those that devices are given and send
    settle: Settle = mean_statistics
    randomness: Randomness = SYSTEM  # of noise and of who takes part, where privacy depends on it

    def with_(self, **parts: Any) -> Round:
        return replace(self, **parts)


@dataclass(frozen=True)
class Played:
    """A round that was played."""

    server: ServerState  # after it
    participants: tuple[str, ...]  # whose updates are in it
    missing: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    loss: float  # mean training loss, by samples; not a number: nobody took part
    up: int  # bytes that all devices sent together,
    down: int  # and that they were given
    before: Sums
    after: Sums
    samples: float
    seconds: float = 0.0  # simulated
    senders: int = 0  # devices that sent something,
    ordered: int = 0  # and that were given an order
    restored: tuple[str, ...] = ()  # who keeps the state of before, because the new one is not finite


def play(
    parts: Round,
    server: ServerState,
    devices: Devices,
    population: Population,
    judges: bool = False,
    strict: bool = True,
    heard: Callable[[int, int], None] = lambda done, given: None,
) -> Played:
    """One round. `strict`: one in which no device's work or update can be used is a Mistake; else the weights stay as they are.
    `heard` is told, as devices answer, how many have so far, and how many were given an order."""
    told, server = Telling(parts.statistics), parts.begin(server, population)
    state = server.state

    def arriving() -> Iterator[Updates]:
        nonlocal state
        for group in parts.choose(server, population):
            order = replace(parts.order(server, group), judges=judges)
            told.ordered(order, group)
            for arrived in devices.work(order, group.names):
                told.missing.extend(arrived.missing)
                told.rejected.extend(arrived.rejected)
                told.restored.extend(arrived.restored)
                told.seconds = max(told.seconds, arrived.seconds)
                heard(told.heard, told.given)
                if arrived.sent is not None:
                    told.sent(arrived.sent)
                    found = replace(parts.decode(order, arrived.sent), age=group.age)
                    updates = told.accepted(found, server.weights.numel())
                    if updates.names:
                        state = parts.note(state, updates, population)
                        yield updates

    combined = parts.combine(server, arriving())
    if strict:
        told.check(server.round)
    after = replace(parts.advance(replace(server, state=state), combined), round=server.round + 1, drawn={})
    if told.statistics and combined.weight:
        rows, counts = (torch.cat(some) for some in zip(*told.statistics, strict=True))
        after = replace(after, statistics=parts.settle(parts.statistics, rows, counts))
    return told.played(after)


class Telling:
    """What is told of a round, gathered while updates arrive."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout  # of the statistics that devices send
        self.statistics: list[tuple[Tensor, Tensor]] = []  # of every chunk, with the devices' counts
        self.names: list[str] = []
        self.missing: list[str] = []
        self.rejected: list[Rejected] = []
        self.restored: list[str] = []
        self.up = self.down = self.senders = self.given = 0
        self.loss = self.samples = self.seconds = 0.0
        self.before: dict[str, tuple[float, float]] = {}
        self.after: dict[str, tuple[float, float]] = {}

    @property
    def heard(self) -> int:
        """Devices of which it is known what became of them."""
        return len(self.names) + len(self.missing) + len(self.rejected)

    def ordered(self, order: Order, group: DeviceGroup) -> None:
        self.down += order.bytes * len(group.names)
        self.given += len(group.names)

    def sent(self, sent: Sent) -> None:
        self.up += sent.bytes * len(sent.told.names)
        self.senders += len(sent.told.names)

    def accepted(self, updates: Updates, size: int) -> Updates:
        """The updates without those that can't be used, which are named and counted: the round goes on."""
        wrong = [
            why or beside
            for why, beside in zip(
                wrong_with(updates, size),
                wrong_statistics(self.layout, updates.statistics, len(updates.names)),
                strict=True,
            )
        ]
        self.rejected.extend(Rejected(name, why) for name, why in zip(updates.names, wrong, strict=True) if why)
        keep = [place for place, why in enumerate(wrong) if not why]
        good = updates if len(keep) == len(updates.names) else updates.some(keep)
        self.names.extend(good.names)
        if good.statistics is not None and good.names:
            self.statistics.append((good.statistics, good.counts))
        self.samples += float(good.counts.sum())
        self.loss += float((good.counts * good.losses).sum())
        for totals, found in ((self.before, good.before), (self.after, good.after)):
            for sums in found:
                add_sums(totals, sums)
        return good

    def check(self, number: int) -> None:
        """What fails on every device is no device's fault."""
        if self.given and not self.names and len(self.rejected) == self.given:
            what = "updates" if self.senders else "work"
            raise Mistake(
                f"the {what} of all {self.given} devices of round {number + 1} failed: "
                f"{counted_kinds(one.why for one in self.rejected)}"
            )

    def played(self, server: ServerState) -> Played:
        loss = self.loss / self.samples if self.samples else float("nan")
        return Played(
            server,
            tuple(self.names),
            tuple(self.missing),
            tuple(self.rejected),
            loss,
            self.up,
            self.down,
            self.before,
            self.after,
            self.samples,
            self.seconds,
            self.senders,
            self.given,
            tuple(self.restored),
        )


def add_sums(totals: dict[str, tuple[float, float]], sums: Sums) -> None:
    for name, (value, weight) in sums.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + value, before[1] + weight)


def wrong_with(updates: Updates, size: int) -> list[str]:
    """Why the update of every device can't be used; empty if it can."""
    if updates.rows.shape[1:] != (size,):
        return [f"its update has the shape {tuple(updates.rows.shape[1:])}, not {(size,)}"] * len(updates.names)
    counted = updates.counts.isfinite() & (updates.counts > 0)
    return [
        why or ("" if good else "it says that it has no sample, or no finite number of them")
        for why, good in zip(not_finite(updates), counted.tolist(), strict=True)
    ]


def not_finite(updates: Updates) -> list[str]:
    """What of every device's update is not finite; empty if all of it is."""
    beside = [one.unsqueeze(-1).flatten(1) for one in updates.extras.values() if one.is_floating_point()]
    checks = (
        (finite(updates.rows), "its update has numbers that are not finite"),
        *((finite(one), "what it sends beside its update has numbers that are not finite") for one in beside),
        *(
            (finite(one), "its statistics have numbers that are not finite")
            for one in (updates.statistics,)
            if one is not None
        ),
        (updates.losses.isfinite(), "its loss is not a finite number"),
    )
    found = [""] * len(updates.names)
    for good, why in reversed(checks):
        for place in (~good).nonzero().flatten().tolist():
            found[place] = why
    return found


def finite(rows: Tensor) -> Tensor:
    """Which rows have only finite numbers. A sum says so at a sixth of the price of looking at each; one that overflows is looked at."""
    found = rows.sum(dim=1).isfinite()
    for place in (~found).nonzero().flatten().tolist():
        found[place] = rows[place].isfinite().all()
    return found
