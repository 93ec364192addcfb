"""The plain round, which everybody writes first: federated averaging of what devices found, nothing compressed, nothing private.

    w  <-  w + sum_i n_i (w_i - w) / sum_i n_i

McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv
1602.05629. It is the yardstick that every technique is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.core.local import Local
from shoestring.federated.layout import Layout
from shoestring.federated.round import (
    Combined,
    DeviceGroup,
    DeviceView,
    Order,
    Population,
    Round,
    Sent,
    ServerState,
    Updates,
    Work,
)
from shoestring.federated.seeds import generator_of

VALUES = "values"  # the name of the numbers in a payload that a further codec may code


def plain_round(layout: Layout, local: Local, work: Work) -> Round:
    """`work`: how devices train; federated/simulation/cohort has the ways to do that for many of them at once."""
    return Round(layout, local, choose, order, work, encode, decode, mean, advance)


def choose(server: ServerState, population: Population) -> Sequence[DeviceGroup]:
    """A fixed number of devices, each at most once, in the order of their numbers."""
    drawn = torch.randperm(population.count, generator=generator_of(server.seed, "choose", server.round))[
        : population.per_round
    ]
    return [DeviceGroup(tuple(population.name(number) for number in drawn.sort().values.tolist()))]


def order(server: ServerState, group: DeviceGroup) -> Order:
    return Order(server.seed, server.round, server.weights)


def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> Sent:
    # Not a view: that would be sent with all the memory that it looks at
    return Sent(replace(updates, rows=updates.rows.new_empty(len(updates.names), 0)), {VALUES: updates.rows})


def decode(order: Order, sent: Sent) -> Updates:
    return replace(sent.told, rows=sent.payload[VALUES])


def mean(server: ServerState, arriving: Iterable[Updates]) -> Combined:
    """The mean by samples. Rows are added in the order in which they come, which is always the same."""
    total, weight = torch.zeros(0), 0.0
    for weights, updates in weighed(arriving):
        part = weights.to(updates.rows.dtype) @ updates.rows
        total = total + part if len(total) else part
        weight += float(weights.sum())
    return Combined(total / weight if weight else torch.zeros_like(server.weights), weight=weight)


def weighed(arriving: Iterable[Updates]) -> Iterator[tuple[Tensor, Updates]]:
    return ((updates.counts, updates) for updates in arriving)


def advance(server: ServerState, combined: Combined) -> ServerState:
    """The weights move by the combined update; techniques' state is as they left it."""
    return replace(server, weights=server.weights + combined.update, state={**server.state, **combined.state})
