"""A small round whose devices pull the weights towards their own samples, and updates made by hand."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.core.technique import applied, in_order
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout, LayoutEntry
from shoestring.federated.playing.plain import plain_round
from shoestring.federated.playing.seeds import generator_of
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
from shoestring.federated.technique import FederatedTechnique, RoundCost

SIZE = 10
LAYOUT = Layout(
    (LayoutEntry("weight", (5,), 0, True), LayoutEntry("bias", (2,), 5, True), LayoutEntry("scale", (3,), 7, True))
)
COST = RoundCost(SIZE, SIZE, up=4 * SIZE + 16, down=4 * SIZE, clients=100, per_round=12, rounds=5)


def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
    """Steps of SGD on 1/2 |w - x|^2, averaged over a device's samples x."""
    rows, losses = [], []
    for device in devices:
        now, found = order.weights.clone(), []
        samples = device.records.data[device.records.trained]
        for _ in range(objective.local.steps or objective.local.epochs):
            found.append(0.5 * float((now - samples).square().sum(1).mean()))
            now -= objective.local.rate * (now - samples.mean(0))
        rows.append(now - order.weights)
        losses.append(sum(found) / len(found))
    counts = [float(device.records.count) for device in devices]
    return Updates(
        tuple(device.name for device in devices),
        torch.stack(rows),
        torch.tensor(counts, dtype=torch.float64),
        torch.tensor(losses, dtype=torch.float64),
    )


def device(number: int) -> DeviceView:
    """A device whose sample count and mean follow from its number."""
    count = 1 + (7 * number) % 5
    data = torch.randn(count, SIZE, generator=generator_of("toy", number)) + 0.3 * number
    return DeviceView(Records(str(number), data, torch.arange(count), torch.arange(0)))


@dataclass(frozen=True)
class ToyDevices:
    parts: Round
    chunk: int = 3

    def work(self, order: Order, names: Sequence[str]) -> Iterator[DeviceResults]:
        for begin in range(0, len(names), self.chunk):
            some = [device(int(name)) for name in names[begin : begin + self.chunk]]
            yield DeviceResults(
                self.parts.encode(order, some, self.parts.work(order, some, Objective(self.parts.local)))
            )


def round_with(*techniques: FederatedTechnique, local: Local = Local(epochs=2, lr=0.1)) -> Round:
    return applied(in_order(techniques), plain_round(LAYOUT, local, work))


def new_server(parts: Round, seed: int = 3) -> ServerState:
    return parts.initial(ServerState(seed, 0, torch.linspace(-1.0, 1.0, SIZE)))


def population(count: int = 30, per_round: int = 8) -> Population:
    return Population(count, str, per_round)


def updates_of(rows: Tensor, counts: Sequence[float] | None = None, **extras: Tensor) -> Updates:
    given = torch.tensor(
        counts if counts is not None else [1.0 + 3.0 * (i % 4) for i in range(len(rows))], dtype=torch.float64
    )
    return Updates(
        tuple(map(str, range(len(rows)))),
        rows,
        given,
        torch.ones(len(rows), dtype=torch.float64),
        {name.replace("_", "."): value for name, value in extras.items()},
    )


def in_chunks(updates: Updates, *sizes: int) -> list[Updates]:
    """Split updates into chunks of these sizes."""
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == len(updates.names)
    return [updates.select(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=True)]


def random_rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))


def saved_and_restored(server: ServerState) -> ServerState:
    """Save a server to bytes and load it again, as a resumed run does."""
    file = io.BytesIO()
    torch.save({"weights": server.weights, "state": dict(server.state)}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    return replace(server, weights=found["weights"], state=found["state"])


def same_state(one: ServerState, other: ServerState) -> bool:
    return (
        torch.equal(one.weights, other.weights)
        and one.state.keys() == other.state.keys()
        and all(torch.equal(value, other.state[name]) for name, value in one.state.items())
    )
