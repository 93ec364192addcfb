"""Devices with given updates: rows chosen by a test, encoded and decoded by the real parts of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.core.technique import applied, in_order
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout, LayoutEntry
from shoestring.federated.planning.evidence import UpdateEvidence
from shoestring.federated.playing.plain import plain_round
from shoestring.federated.playing.randomness import Randomness, SeededRandomness
from shoestring.federated.round import (
    DeviceGroup,
    DeviceView,
    EncodedUpdates,
    Objective,
    Order,
    Round,
    ServerState,
    Updates,
)
from shoestring.federated.technique import FederatedTechnique, RoundCost

SEED = 5
FOR_TESTS = SeededRandomness(SEED)


@dataclass
class MadeUp:
    """Devices whose updates are `rows`; each keeps its state from round to round."""

    rows: Mapping[str, Tensor]
    techniques: Sequence[FederatedTechnique] = ()
    randomness: Randomness = FOR_TESTS  # of noise
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    started: list[Tensor] = field(default_factory=list)  # the weights that devices started from

    @property
    def size(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def parts(self) -> Round:
        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            self.started.append(order.weights)
            count = len(devices)
            return Updates(
                tuple(one.name for one in devices),
                torch.stack([self.rows[one.name] for one in devices]).float(),
                torch.arange(1, count + 1, dtype=torch.float64),
                torch.ones(count, dtype=torch.float64),
            )

        layout = Layout((LayoutEntry("w", (self.size,), 0, True),))
        return applied(in_order(self.techniques), plain_round(layout, Local(), work).with_(randomness=self.randomness))

    def server(self, number: int = 0, weights: Tensor | None = None) -> ServerState:
        return ServerState(SEED, number, torch.zeros(self.size) if weights is None else weights)

    def devices(self, names: Sequence[str]) -> list[DeviceView]:
        return [
            DeviceView(Records(name, [], torch.arange(3), torch.arange(0)), self.states.setdefault(name, {}))
            for name in names
        ]

    def sent(
        self, names: Sequence[str], number: int = 0, weights: Tensor | None = None
    ) -> tuple[Order, EncodedUpdates]:
        parts = self.parts
        order = parts.order(self.server(number, weights), DeviceGroup(tuple(names)))
        devices = self.devices(names)
        return order, parts.encode(order, devices, parts.work(order, devices, Objective(Local())))

    def arrived(self, names: Sequence[str], number: int = 0, weights: Tensor | None = None) -> Tensor:
        return self.parts.decode(*self.sent(names, number, weights)).rows


def alone(row: Tensor, *techniques: FederatedTechnique) -> MadeUp:
    return MadeUp({"ada": row}, techniques)


def kinds(size: int = 5000) -> dict[str, Tensor]:
    """Updates of several shapes."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(size, generator=generator)
    heavy = torch.randn(size, generator=generator) / torch.rand(size, generator=generator).clamp(min=1e-3)
    sparse = normal * (torch.rand(size, generator=generator) < 0.02)
    huge = normal * 1e-3
    huge[size // 3] = 50.0
    return {
        "normal": normal * 0.01,
        "heavy": heavy,
        "sparse": sparse,
        "huge": huge,
        "same": torch.full((size,), 0.3),
        "zero": torch.zeros(size),
    }


def plain_cost(row: Tensor, per_round: int = 1, evidence: bool = True) -> RoundCost:
    size = len(row)
    return RoundCost(
        size,
        size,
        up=4 * size + 16,
        down=4 * size,
        clients=100,
        per_round=per_round,
        rounds=10,
        evidence=UpdateEvidence.of(row.float()[None], 0.1) if evidence else None,
    )


def total(techniques: Sequence[FederatedTechnique], cost: RoundCost) -> RoundCost:
    for one in in_order(techniques):
        assert not one.refusal(cost)
        cost = one.cost(cost)
    return cost


def measured(row: Tensor, techniques: Sequence[FederatedTechnique], rounds: int = 1) -> float:
    """Mean over rounds of |arrived - row|^2 / |row|^2, each with a new device without state."""
    came = [alone(row, *techniques).arrived(["ada"], number)[0].double() for number in range(rounds)]
    found = [float((one - row.double()).square().sum()) for one in came]
    whole = float(row.double().square().sum())
    return sum(found) / rounds / whole if whole else sum(found)
