"""FedBuff: buffered asynchronous aggregation, which does not wait for stragglers. The weights move as soon as a few
devices have answered.

    w  <-  w + sum_i s_i n_i d_i / sum_i n_i        over the `buffer` devices that finished first
    s_i  =  1 / sqrt(1 + age_i)                     age (staleness): rounds since the weights that device i started from

`concurrency` devices are at work at any time. When one finishes, another one is drawn and starts from the newest
weights. The paper weights devices equally; here they are weighted by their samples n_i, as in FedAvg. As in the paper,
s_i scales the update and not the divisor. Other aggregation rules receive the updates s_i d_i. Norm-layer statistics
become the plain mean, whatever their age.

Time is simulated: device i takes exp(spread z_i) seconds with z_i ~ N(0, 1), the same in all rounds. The server's state
has the devices at work, the weights of the last `oldest` rounds and, in "FedBuff.clock", the simulated seconds since
the first round. A device whose weights become older than `oldest` is given up and counted in "FedBuff.dropped".
Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba 2022, Federated Learning with Buffered Asynchronous Aggregation,
arXiv 2106.06639.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import Combined, DeviceGroup, Order, Population, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.combine.arrivals import (
    BufferFill,
    BufferRules,
    DeviceAtWork,
    draw_idle_device,
    fill_buffer,
)
from shoestring.federated.techniques.combine.robust import with_state

STALENESS: dict[str, Callable[[int], float]] = {"sqrt": lambda age: (1.0 + age) ** -0.5, "none": lambda age: 1.0}


@dataclass(frozen=True)
class FedBuff(FederatedTechnique):
    """Move the weights as soon as a few devices have answered.

    Costs: updates of older weights, and the weights of the last `oldest` rounds on the server.

    Not for: devices of equal speed, and private noise: fast devices take part more often than chance would have it.
    """

    buffer: int = 10  # updates after which the weights move
    concurrency: int = 0  # devices at work at any time; 0: as many as take part in a round
    staleness: str = "sqrt"  # how an update shrinks with its age: "sqrt", or "none"
    oldest: int = 20  # greatest age of an update, in rounds
    spread: float = 1.0  # standard deviation of the logarithm of devices' times

    why: ClassVar[str] = "asynchronous: does not wait for stragglers"
    seam: ClassVar[str] = "combine"
    order: ClassVar[int] = 80
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("buffer", 1), ("concurrency", 0), ("oldest", 0), ("spread", 0)):
            if not least <= getattr(self, name) < float("inf"):
                raise Mistake(f"FedBuff({name}={getattr(self, name)}): give {least} or more")
        if self.staleness not in STALENESS:
            raise Mistake(f"FedBuff(staleness={self.staleness!r}): there are {', '.join(STALENESS)}")

    def refusal(self, cost: RoundCost) -> str:
        if cost.delta:
            return (
                "epsilon is computed for devices sampled independently at random, and with FedBuff fast devices take part more "
                "often: leave out FedBuff, or --epsilon and --delta"
            )
        return self.impossible(cost.clients, cost.per_round)

    def impossible(self, clients: int, per_round: int) -> str:
        at_work = self.concurrency or per_round
        if at_work < self.buffer:
            return (
                f"{at_work} devices are at work at a time, so {self.buffer} can't finish: give buffer={at_work} or less, or "
                f"concurrency={self.buffer} or more"
            )
        if at_work > clients:
            return (
                f"{at_work} devices can't be at work at a time, there are {clients}: give concurrency={clients} or less"
            )
        return ""

    def cost(self, cost: RoundCost) -> RoundCost:
        return replace(cost, per_round=self.buffer)

    def apply(self, round: Round) -> Round:
        def duration(order: Order, name: str) -> float:
            normal = torch.randn((), dtype=torch.float64, generator=generator_of(order.seed, "speed", name))
            return exp(self.spread * float(normal)) * round.duration(order, name)

        def initial(server: ServerState) -> ServerState:
            made = round.initial(server)
            return with_state(
                made,
                {
                    "FedBuff.versions": made.row.repeat(self.oldest + 1, 1),
                    **state_entries(BufferFill((), (), 0.0, 0), dropped=0),
                },
            )

        def begin(server: ServerState, population: Population) -> ServerState:
            return self.fill_buffer(round.begin(server, population), population, duration)

        def order(server: ServerState, group: DeviceGroup) -> Order:
            """The order that the device received when it started: with that round's weights and random numbers."""
            if not group.age:
                return round.order(server, group)
            begun, row = server.round - group.age, self.weights_at_age(server, group.age)
            size = len(server.weights)
            return round.order(replace(server, round=begun, weights=row[:size], statistics=row[size:]), group)

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            return round.combine(server, map(self.discount, arriving))

        return round.with_(
            initial=initial, begin=begin, choose=arrived_groups, order=order, combine=combine, duration=duration
        )

    def fill_buffer(
        self, server: ServerState, population: Population, duration: Callable[[Order, str], float]
    ) -> ServerState:
        """The server when enough devices have finished for a round."""
        if reason := self.impossible(population.count, population.per_round):
            raise Mistake(f"FedBuff: {reason}")
        order = Order(server.seed, server.round, server.weights)
        generator = generator_of(server.seed, "FedBuff", server.round)
        found = fill_buffer(
            devices_at_work(server),
            float(server.state["FedBuff.clock"]),
            server.round,
            BufferRules(self.concurrency or population.per_round, self.buffer, self.oldest),
            lambda busy: draw_idle_device(population.count, busy, generator),
            lambda number: duration(order, population.name(number)),
        )
        versions = server.state["FedBuff.versions"].clone()
        versions[server.round % (self.oldest + 1)] = server.row
        return with_state(
            server, {"FedBuff.versions": versions, **state_entries(found, int(server.state["FedBuff.dropped"]))}
        )

    def weights_at_age(self, server: ServerState, age: int) -> Tensor:
        """The whole model that was the newest `age` rounds ago."""
        return server.state["FedBuff.versions"][(server.round - age) % (self.oldest + 1)].clone()

    def discount(self, updates: Updates) -> Updates:
        return replace(updates, rows=STALENESS[self.staleness](updates.age) * updates.rows) if updates.age else updates


def arrived_groups(server: ServerState, population: Population) -> Sequence[DeviceGroup]:
    """The devices that have finished, by the age of the weights that they began from."""
    arrived: list[list[int]] = server.state["FedBuff.arrived"].tolist()
    versions = sorted({version for _, version in arrived}, reverse=True)
    return [
        DeviceGroup(
            tuple(population.name(number) for number, begun in sorted(arrived) if begun == version),
            server.round - version,
        )
        for version in versions
    ]


def state_entries(found: BufferFill, dropped: int) -> dict[str, Tensor]:
    """The outcome of a round as entries of the server's state; `dropped`: devices given up in earlier rounds."""
    return {
        "FedBuff.clock": torch.tensor(found.clock, dtype=torch.float64),
        "FedBuff.dropped": torch.tensor(dropped + found.dropped),
        "FedBuff.arrived": device_versions(found.arrived),
        "FedBuff.flying": device_versions(found.flying),
        "FedBuff.done": torch.tensor([one.done for one in found.flying], dtype=torch.float64),
    }


def device_versions(some: Sequence[DeviceAtWork]) -> Tensor:
    """(n, 2): number and version of every device."""
    return torch.tensor([(one.number, one.version) for one in some], dtype=torch.int64).view(-1, 2)


def devices_at_work(server: ServerState) -> list[DeviceAtWork]:
    return [
        DeviceAtWork(done, number, version)
        for done, (number, version) in zip(
            server.state["FedBuff.done"].tolist(), server.state["FedBuff.flying"].tolist(), strict=True
        )
    ]
