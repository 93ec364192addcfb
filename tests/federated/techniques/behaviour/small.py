"""A small federated job of real training, with uneven counts, and a few rounds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoestring.core.clients.local import Local
from shoestring.core.clients.statistics import StatisticsRule
from shoestring.core.job import Job
from shoestring.federated.model.layout import Layout, layout_of
from shoestring.federated.model.statistics import with_statistics
from shoestring.federated.playing.plain import plain_round
from shoestring.federated.playing.play import RoundResult, play
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import Order, Population, Round, ServerState
from shoestring.federated.simulation.cohort import Engine, MethodChoice, engine_work
from shoestring.federated.simulation.simulated_devices import DeviceWorker, SimulatedDevices
from shoestring.federated.technique import FederatedTechnique

SEED, CLASSES = 3, 4
COUNTS = {
    f"device {number}": count for number, count in enumerate((3, 7, 11, 15, 19, 25))
}  # no batch of one: batch norm can't


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


@lru_cache
def clients() -> dict[str, TensorDataset]:
    made = {}
    for name, count in COUNTS.items():
        generator = generator_of(name)
        made[name] = TensorDataset(
            torch.randn(count, 5, generator=generator), torch.randint(CLASSES, (count,), generator=generator)
        )
    return made


def job(local: Local | None = None) -> Job:
    return Job(model, data=list, clients=clients, local=local or Local(epochs=2, batch=5, lr=0.1, held_out=0.34))


@dataclass
class Small:
    techniques: tuple[FederatedTechnique, ...] = ()
    chunk: int = 2
    per_round: int = 4
    records: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.job, made = job(), model()
        self.layout: Layout = layout_of(made)
        self.start = self.layout.row(made)
        engine = Engine(self.job, self.layout, MethodChoice("sequential", 1, "one after the other"))
        plain = plain_round(self.layout, self.job.local, engine_work(engine))
        self.parts: Round = with_statistics(plain, self.layout, StatisticsRule.AVERAGED, self.start)
        for technique in self.techniques:
            self.parts = technique.apply(self.parts)
        self.server = self.parts.initial(
            ServerState(
                SEED, 0, self.start[: self.layout.trained_count], statistics=self.start[self.layout.trained_count :]
            )
        )
        self.devices = SimulatedDevices(DeviceWorker(self.parts, self.job, self.records or clients(), SEED), self.chunk)

    def round(self, judges: bool = False) -> RoundResult:
        names = list(self.records or COUNTS)
        played = play(
            self.parts,
            self.server,
            self.devices,
            Population(len(names), names.__getitem__, self.per_round),
            judges=judges,
        )
        self.server = played.server
        return played

    def order(self, number: int = 0, judges: bool = False) -> Order:
        """The order of a round that begins from the initial model."""
        trained = self.layout.trained_count
        return Order(SEED, number, self.start[:trained], judges=judges, statistics=self.start[trained:])
