"""A federated round: choose, order, work, encode, decode, combine, advance. Techniques replace these parts; the loop
(play.py) does not know them.

    server                                   devices (simulated or real: two implementations of `Devices`)
    choose   the cohort
    order    instructions          ------->  work     local training on the device's own records
                                             encode   compress the client update
    decode   the client updates    <-------
    combine  aggregation: one update from all
    advance  server optimizer: the next weights

Devices work in groups, a row of a matrix each, so a thousand simulated devices need a few matrix products. A real
device works on a single row. State that must survive a restart is in `ServerState.state`, or in `DeviceView.state` on a
device.

Contract: What is kept is kept as tensors, saved with every checkpoint (tests/federated/test_session.py). The rows of a
chunk never depend on how many processes there are (tests/federated/simulation/test_simulated_devices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.federated.devices.records import Records
from shoestring.federated.model.combined_statistics import mean_statistics
from shoestring.federated.model.layout import Layout
from shoestring.federated.playing.randomness import SYSTEM, Randomness

Tensors = Mapping[str, Tensor]
NONE = Layout(())


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between two rounds."""

    seed: int
    round: int  # rounds finished
    weights: Tensor  # (size): the trained weights
    state: Tensors = field(
        default_factory=dict
    )  # state of techniques by name: moments, control variates, a clipping norm
    statistics: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # of norm layers, see federated/model/statistics.py
    drawn: Tensors = field(
        default_factory=dict
    )  # random choices of this round, such as the cohort. They are secret and never written to a file

    @property
    def row(self) -> Tensor:
        """The whole model: weights, then statistics."""
        return torch.cat([self.weights, self.statistics])


class DeviceGroup(NamedTuple):
    """Devices that begin from the same weights."""

    names: tuple[str, ...]
    age: int = 0  # staleness of those weights, in rounds; 0: the newest


@dataclass(frozen=True)
class Order:
    """The server's instructions to a device."""

    seed: int
    round: int  # from 0
    weights: Tensor  # (size): where local training begins
    extras: Tensors = field(default_factory=dict)  # added by techniques
    judges: bool = False  # whether the device also evaluates on its held-out records, before and after training
    statistics: Tensor | None = None  # to begin with; None: the device's own, or the job's initial ones

    @property
    def bytes(self) -> int:
        """Bytes sent to a device."""
        beside = () if self.statistics is None else (self.statistics,)
        return sum(one.numel() * one.element_size() for one in (self.weights, *self.extras.values(), *beside))


@dataclass(frozen=True)
class DeviceView:
    """A device from its own point of view."""

    records: Records
    state: dict[str, Tensor] = field(
        default_factory=dict
    )  # kept by techniques between rounds; it never leaves the device

    @property
    def name(self) -> str:
        return self.records.name


@dataclass(frozen=True)
class Objective:
    """What local training minimises: the device's loss, plus terms that techniques add.

    gradient of a step  =  gradient of the loss  +  pull (w - anchor)  +  correction
    """

    local: Local
    start: Tensor | None = None  # (k, size): where each device begins; None: at the order's weights
    pull: float = 0.0
    anchor: Tensor | None = None  # (size)
    correction: Tensor | None = None  # (k, trained)
    model: str = ""  # name of a personal model, whose statistics the device keeps separately; empty: the shared model


Sums = Mapping[str, tuple[float, float]]  # metric -> (sum of value x weight over samples, sum of weights)


@dataclass(frozen=True)
class Updates:
    """The client updates of k devices, a row each."""

    names: tuple[str, ...]
    rows: Tensor  # (k, size): weights after local training minus weights before
    counts: Tensor  # (k) float64: training samples
    losses: Tensor  # (k) float64: mean training loss
    extras: Tensors = field(default_factory=dict)  # (k, ...) each: sent along by techniques
    before: tuple[Sums, ...] = ()  # held-out metrics of every device before local training, if the order asked for them
    after: tuple[Sums, ...] = ()  # and after it
    age: int = 0  # staleness of the weights they began from, as in `DeviceGroup`; not sent
    statistics: Tensor | None = None  # (k, ...) after training (values, not differences); None: not sent

    def select(self, keep: Sequence[int]) -> Updates:
        """The updates of the devices at these places."""
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
class EncodedUpdates:
    """What k devices send: a payload that encodes the rows, and a header with the rest of their updates."""

    header: Updates  # rows are empty: (k, 0)
    payload: Tensors  # (k, ...) each

    @property
    def bytes(self) -> int:
        """Bytes sent by each device: payload, statistics, extras, number of samples and loss."""
        beside = () if self.header.statistics is None else (self.header.statistics,)
        tensors = (
            *self.payload.values(),
            *self.header.extras.values(),
            *beside,
            self.header.counts,
            self.header.losses,
        )
        return sum(one[0].numel() * one.element_size() for one in tensors)

    def copy(self) -> EncodedUpdates:
        """The same in memory of its own."""
        header = self.header
        return EncodedUpdates(
            replace(
                header,
                counts=header.counts.clone(),
                losses=header.losses.clone(),
                statistics=None if header.statistics is None else header.statistics.clone(),
                extras={name: value.clone() for name, value in header.extras.items()},
            ),
            {name: value.clone() for name, value in self.payload.items()},
        )


@dataclass(frozen=True)
class RejectedDevice:
    """A device whose update can't be used."""

    name: str
    why: str  # our own text, never one made on the device (device_errors)


@dataclass(frozen=True)
class DeviceResults:
    """The outcome for one chunk of devices."""

    sent: EncodedUpdates | None  # None: no device of the chunk answered
    missing: tuple[str, ...] = ()  # devices that did not answer
    rejected: tuple[RejectedDevice, ...] = ()  # devices whose work failed
    seconds: float = 0.0  # simulated time from the round's start to the chunk's last answer
    restored: tuple[str, ...] = ()  # devices whose new state was not finite, so they keep the old one


class Devices(Protocol):
    """The devices, as the server sees them.

    The order of results follows from the names alone. What was sent lies in memory that the next call of `work` may
    use again.
    """

    def work(self, order: Order, names: Sequence[str]) -> Iterator[DeviceResults]: ...


@dataclass(frozen=True)
class Combined:
    """The aggregated update of a round."""

    update: Tensor  # (size)
    state: Tensors = field(default_factory=dict)  # new values for the server's state
    weight: float = 0.0  # total weight of the updates in it; 0: there were none


Choose = Callable[[ServerState, "Population"], Sequence[DeviceGroup]]
MakeOrder = Callable[[ServerState, DeviceGroup], Order]
Work = Callable[[Order, Sequence[DeviceView], Objective], Updates]
Encode = Callable[[Order, Sequence[DeviceView], Updates], EncodedUpdates]
Decode = Callable[[Order, EncodedUpdates], Updates]
Combine = Callable[[ServerState, Iterable[Updates]], Combined]
Advance = Callable[[ServerState, Combined], ServerState]
Settle = Callable[
    [Layout, Tensor, Tensor], Tensor
]  # statistics (k, s) of devices and their counts (k) -> the server's (s)
Note = Callable[[Tensors, Updates, "Population"], Tensors]  # server's state, one chunk of updates -> new state


@dataclass(frozen=True)
class Population:
    """All clients, and how many of them take part in a round."""

    count: int  # devices
    name: Callable[[int], str]  # name of the n-th device
    per_round: int


@dataclass(frozen=True)
class Round:
    """The parts of a round. Techniques replace some of them (`with_`), and `play` calls them."""

    layout: Layout  # of the trained weights
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
    )  # adds the techniques' state before the first round
    begin: Callable[[ServerState, Population], ServerState] = lambda server, population: (
        server
    )  # at the start of every round, before `choose`, for state that depends on the population
    note: Note = lambda state, updates, population: (
        state
    )  # updates the server's state with every chunk that arrives, whatever `combine` does with it
    answers: Callable[[Order, str], bool] = lambda order, name: True  # simulated devices: whether one answers at all,
    duration: Callable[[Order, str], float] = lambda order, name: (
        1.0
    )  # and after how long, in units of the median device's time
    initial_weights: Tensor | None = None  # (size): every device can make them itself, from the job and its seed
    statistics: Layout = NONE  # statistics that devices receive and send
    settle: Settle = mean_statistics  # combines the devices' statistics
    randomness: Randomness = SYSTEM  # for noise and client sampling, where privacy depends on them

    def with_(self, **parts: Any) -> Round:
        return replace(self, **parts)
