"""Devices whose local loss is |w - sample|^2 / 2, in a model of a body and a head; counts of samples are uneven."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout, LayoutEntry
from shoestring.federated.playing.plain import plain_round
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.round import (
    DeviceResults,
    DeviceView,
    Objective,
    Order,
    Population,
    Round,
    ServerState,
    Updates,
)
from shoestring.federated.simulation.cohort.schedule import batches
from shoestring.federated.technique import FederatedTechnique, RoundCost

LAYOUT = Layout(
    (
        LayoutEntry("body.weight", (2, 2), 0, True),
        LayoutEntry("head.weight", (2,), 4, True),
        LayoutEntry("head.bias", (1,), 6, True),
    )
)
LOCAL = Local(epochs=2, batch=3, lr=0.1)
COUNTS = {"ada": 1, "bob": 4, "cyd": 9, "dan": 7}
SEED = 5
START = torch.linspace(-1, 1, LAYOUT.size)
COST = RoundCost(
    size=LAYOUT.size,
    values=LAYOUT.size,
    up=4 * LAYOUT.size + 16,
    down=4 * LAYOUT.size,
    clients=len(COUNTS),
    per_round=3,
    rounds=3,
    device_seconds=1.0,
    layout=LAYOUT,
)


def samples_of(name: str) -> Tensor:
    return torch.randn(COUNTS[name] + 2, LAYOUT.size, generator=torch.Generator().manual_seed(seed_of(name)))


def records_of(name: str) -> Records:
    """The last two samples are held out."""
    count = COUNTS[name]
    return Records(name, samples_of(name), torch.arange(count), torch.tensor([count, count + 1]))


def device_of(name: str) -> DeviceView:
    return DeviceView(records_of(name))


def means(name: str, number: int, local: Local = LOCAL) -> Iterator[Tensor]:
    """The mean of every step's samples."""
    for places in batches(COUNTS[name], local, seed_of(SEED, "batches", number, name)):
        yield samples_of(name)[places].mean(0)


def quadratic(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
    """The work of a plain round."""
    ends = []
    starts = order.weights.expand(len(devices), -1) if objective.start is None else objective.start
    for place, device in enumerate(devices):
        now = starts[place].clone()
        for mean in means(device.name, order.round, objective.local):
            gradient = now - mean
            if objective.pull and objective.anchor is not None:
                gradient = gradient + objective.pull * (now - objective.anchor)
            if objective.correction is not None:
                gradient = gradient + objective.correction[place]
            now -= objective.local.rate * gradient
        ends.append(now)
    rows = torch.stack(ends) - starts
    counts = torch.tensor([device.records.count for device in devices], dtype=torch.float64)
    made = Updates(
        tuple(device.name for device in devices), rows, counts, torch.zeros(len(devices), dtype=torch.float64)
    )
    return (
        replace(made, before=judged(starts, devices), after=judged(torch.stack(ends), devices))
        if order.judges
        else made
    )


def judged(rows: Tensor, devices: Sequence[DeviceView]) -> tuple[dict[str, tuple[float, float]], ...]:
    return tuple({"distance": (distance(row, device.name), 1.0)} for row, device in zip(rows, devices, strict=True))


def distance(row: Tensor, name: str) -> float:
    return float((row - samples_of(name)[COUNTS[name] :]).norm())


@dataclass
class Here:
    """Devices of this process, `chunk` at once."""

    parts: Round
    chunk: int = 2
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def work(self, order: Order, names: Sequence[str]) -> Iterator[DeviceResults]:
        for begin in range(0, len(names), self.chunk):
            devices = [
                DeviceView(records_of(name), self.states.setdefault(name, {}))
                for name in names[begin : begin + self.chunk]
            ]
            yield DeviceResults(
                self.parts.encode(order, devices, self.parts.work(order, devices, Objective(self.parts.local)))
            )


def plain() -> Round:
    return plain_round(LAYOUT, LOCAL, quadratic).with_(initial_weights=START)


def population(per_round: int = 3) -> Population:
    return Population(len(COUNTS), list(COUNTS).__getitem__, per_round)


@dataclass
class Run:
    """A few rounds of techniques."""

    techniques: tuple[FederatedTechnique, ...]
    chunk: int = 2
    per_round: int = 3
    changed: Callable[[Round], Round] = lambda parts: parts

    def __post_init__(self) -> None:
        self.parts = plain()
        for technique in self.techniques:
            self.parts = technique.apply(self.parts)
        self.parts = self.changed(self.parts)
        self.server = self.parts.initial(ServerState(SEED, 0, START))
        self.devices = Here(self.parts, self.chunk)

    def round(self, judges: bool = False) -> RoundResult:
        played = play(self.parts, self.server, self.devices, population(self.per_round), judges=judges)
        self.server = played.server
        return played


def mean_of(rows: dict[str, Tensor]) -> Tensor:
    """Mean weighted by samples."""
    return sum(COUNTS[name] * row for name, row in rows.items()) / sum(COUNTS[name] for name in rows)  # type: ignore[return-value]
