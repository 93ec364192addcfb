"""FedBuff: nobody waits for slow devices. As soon as a few have answered, the weights move; who is still at work goes on with older ones.

    w  <-  w + sum_i s_i n_i d_i / sum_i n_i        over the `buffer` devices that were done first
    s_i  =  1 / sqrt(1 + age_i)                     age: rounds that passed since the weights that device i began from

`concurrency` devices are at work at any time. One that is done is replaced by another, drawn anew, which begins from the newest weights.
The paper takes devices alike; here they weigh n_i, their samples, as in FedAvg. As in the paper, s_i shrinks an update and not the sum that
it is divided by. Any other rule of combination is given the updates s_i d_i. Statistics of norm layers become the mean of what devices
have, whatever their age.

Time is simulated: device i takes exp(spread z_i) seconds, z_i ~ N(0, 1), the same in all rounds, times what `Slow` says: their spreads
add. Who works, since when and until when is in the server's state, and so are the weights of the last `oldest` rounds; "FedBuff.clock" has
the simulated seconds since the first round began. A device that would come later than that is given up, and counted in "FedBuff.dropped".
Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba 2022, Federated Learning with Buffered Asynchronous Aggregation, arXiv 2106.06639.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.round import Combined, DeviceGroup, Order, Population, Round, ServerState, Updates
from shoestring.federated.seeds import generator_of
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.combine.flight import Flown, Flying, drawn, flown
from shoestring.federated.techniques.combine.gathered import with_state

STALENESS: dict[str, Callable[[int], float]] = {"sqrt": lambda age: (1.0 + age) ** -0.5, "none": lambda age: 1.0}


@dataclass(frozen=True)
class FedBuff(FederatedTechnique):
    """Move the weights as soon as a few devices have answered.

    Costs: updates of older weights, and the weights of the last `oldest` rounds on the server.

    Not for: devices of equal speed, and private noise: fast devices take part more often than chance would have it.
    """

    buffer: int = 10  # updates after which the weights move
    concurrency: int = 0  # devices at work at any time; 0: as many as take part in a round
    staleness: str = "sqrt"  # how an update's weight falls with its age: "sqrt", or "none"
    oldest: int = 20  # the greatest age
    spread: float = 1.0  # standard deviation of the logarithm of devices' times

    why: ClassVar[str] = "asynchronous: nobody waits for slow devices"
    seam: ClassVar[str] = "combine"
    order: ClassVar[int] = 80

    def __post_init__(self) -> None:
        for name, least in (("buffer", 1), ("concurrency", 0), ("oldest", 0), ("spread", 0)):
            if not least <= getattr(self, name) < float("inf"):
                raise Mistake(f"FedBuff({name}={getattr(self, name)}): give {least} or more")
        if self.staleness not in STALENESS:
            raise Mistake(f"FedBuff(staleness={self.staleness!r}): there are {', '.join(STALENESS)}")

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[FedBuff, ...]:
        return ()

    def refusal(self, cost: RoundCost) -> str:
        if cost.delta:
            return (
                "an epsilon is asked for, and it is calculated for devices that are drawn by chance alone: here fast ones take part "
                "more often; leave out FedBuff, or --epsilon and --delta"
            )
        return self.wrong(cost.clients, cost.per_round)

    def wrong(self, clients: int, per_round: int) -> str:
        at_work = self.concurrency or per_round
        if at_work < self.buffer:
            return (
                f"{at_work} devices are at work at a time, of which {self.buffer} can't be done: give buffer={at_work} or less, or "
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
                {"FedBuff.versions": made.row.repeat(self.oldest + 1, 1), **written(Flown((), (), 0.0, 0), dropped=0)},
            )

        def begin(server: ServerState, population: Population) -> ServerState:
            if reason := self.wrong(population.count, population.per_round):
                raise Mistake(f"FedBuff: {reason}")
            server = round.begin(server, population)
            order, generator = (
                Order(server.seed, server.round, server.weights),
                generator_of(server.seed, "FedBuff", server.round),
            )
            found = flown(
                flying(server),
                float(server.state["FedBuff.clock"]),
                server.round,
                self.oldest,
                self.concurrency or population.per_round,
                self.buffer,
                lambda busy: drawn(population.count, busy, generator),
                lambda number: duration(order, population.name(number)),
            )
            versions = server.state["FedBuff.versions"].clone()
            versions[server.round % (self.oldest + 1)] = server.row
            return with_state(
                server, {"FedBuff.versions": versions, **written(found, int(server.state["FedBuff.dropped"]))}
            )

        def choose(server: ServerState, population: Population) -> Sequence[DeviceGroup]:
            arrived: list[list[int]] = server.state["FedBuff.arrived"].tolist()
            versions = sorted({version for _, version in arrived}, reverse=True)
            return [
                DeviceGroup(
                    tuple(population.name(number) for number, begun in sorted(arrived) if begun == version),
                    server.round - version,
                )
                for version in versions
            ]

        def order(server: ServerState, group: DeviceGroup) -> Order:
            """As it was given when the device began: of the weights, and with the random numbers, of that round."""
            if not group.age:
                return round.order(server, group)
            begun, row = server.round - group.age, self.row(server, group.age)
            size = len(server.weights)
            return round.order(replace(server, round=begun, weights=row[:size], statistics=row[size:]), group)

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            return round.combine(server, map(self.faded, arriving))

        return round.with_(initial=initial, begin=begin, choose=choose, order=order, combine=combine, duration=duration)

    def row(self, server: ServerState, age: int) -> Tensor:
        """The model that was the newest `age` rounds ago."""
        return server.state["FedBuff.versions"][(server.round - age) % (self.oldest + 1)].clone()

    def faded(self, updates: Updates) -> Updates:
        return replace(updates, rows=STALENESS[self.staleness](updates.age) * updates.rows) if updates.age else updates


def written(found: Flown, dropped: int) -> dict[str, Tensor]:
    """What happened, as the server's state; `dropped`: devices before."""
    return {
        "FedBuff.clock": torch.tensor(found.clock, dtype=torch.float64),
        "FedBuff.dropped": torch.tensor(dropped + found.dropped),
        "FedBuff.arrived": numbers_of(found.arrived),
        "FedBuff.flying": numbers_of(found.flying),
        "FedBuff.done": torch.tensor([one.done for one in found.flying], dtype=torch.float64),
    }


def numbers_of(some: Sequence[Flying]) -> Tensor:
    """(n, 2): device, version."""
    return torch.tensor([(one.number, one.version) for one in some], dtype=torch.int64).view(-1, 2)


def flying(server: ServerState) -> list[Flying]:
    return [
        Flying(done, number, version)
        for done, (number, version) in zip(
            server.state["FedBuff.done"].tolist(), server.state["FedBuff.flying"].tolist(), strict=True
        )
    ]
