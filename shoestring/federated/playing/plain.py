"""The plain round: federated averaging (FedAvg), nothing compressed, nothing private.

    w  <-  w + sum_i n_i (w_i - w) / sum_i n_i

McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017, Communication-Efficient Learning of Deep Networks from
Decentralized Data, arXiv 1602.05629. Every technique is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.federated.model.layout import Layout
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import (
    Combined,
    DeviceGroup,
    DeviceView,
    EncodedUpdates,
    Order,
    Population,
    Round,
    ServerState,
    Updates,
    Work,
)

VALUES = "values"  # key of a payload's numbers that another codec may compress further


def plain_round(layout: Layout, local: Local, work: Work) -> Round:
    """FedAvg on this layout. `work` trains the devices; federated/simulation/cohort has methods that train many of them
    at once."""
    return Round(layout, local, choose, order, work, encode, decode, mean, advance)


def choose(server: ServerState, population: Population) -> Sequence[DeviceGroup]:
    """Sample `per_round` devices uniformly without replacement."""
    drawn = torch.randperm(population.count, generator=generator_of(server.seed, "choose", server.round))[
        : population.per_round
    ]
    return [DeviceGroup(tuple(population.name(number) for number in drawn.sort().values.tolist()))]


def order(server: ServerState, group: DeviceGroup) -> Order:
    return Order(server.seed, server.round, server.weights)


def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> EncodedUpdates:
    # Not a view: pickling a view sends all of its base tensor's memory
    return EncodedUpdates(replace(updates, rows=updates.rows.new_empty(len(updates.names), 0)), {VALUES: updates.rows})


def decode(order: Order, sent: EncodedUpdates) -> Updates:
    return replace(sent.header, rows=sent.payload[VALUES])


def mean(server: ServerState, arriving: Iterable[Updates]) -> Combined:
    """Mean weighted by samples. Rows are added in the order of arrival, which is always the same."""
    total, weight = torch.zeros(0), 0.0
    for weights, updates in sample_weights(arriving):
        part = weights.to(updates.rows.dtype) @ updates.rows
        total = total + part if len(total) else part
        weight += float(weights.sum())
    return Combined(total / weight if weight else torch.zeros_like(server.weights), weight=weight)


def sample_weights(arriving: Iterable[Updates]) -> Iterator[tuple[Tensor, Updates]]:
    return ((updates.counts, updates) for updates in arriving)


def advance(server: ServerState, combined: Combined) -> ServerState:
    """Add the combined update to the weights, and keep the techniques' new state."""
    return replace(server, weights=server.weights + combined.update, state={**server.state, **combined.state})
