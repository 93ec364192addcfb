"""Plays a federated round: the second small loop, which knows no technique, and what it counts on the way.

An update that can't be used (of another shape, not finite, without samples) is left out and named; the round goes on.
A finite update is used although its loss may be none: a batch whose targets are all ignored has the loss 0 / 0 and the
gradient 0. Such a loss is left out of the round's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.devices.device_errors import count_kinds
from shoestring.federated.model.combined_statistics import statistics_problems
from shoestring.federated.model.layout import Layout
from shoestring.federated.round import (
    Combined,
    DeviceGroup,
    Devices,
    EncodedUpdates,
    Order,
    Population,
    RejectedDevice,
    Round,
    ServerState,
    Sums,
    Updates,
)

COMMON = 10  # a metric is only reported if this many devices, or half of those with any metric, measured it


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one round."""

    server: ServerState  # after the round
    participants: tuple[str, ...]  # devices whose updates were used
    missing: tuple[str, ...]
    rejected: tuple[RejectedDevice, ...]
    loss: float  # mean training loss of devices that have a finite one, weighted by samples; nan: none has
    up: int  # bytes sent by all devices together,
    down: int  # and to them
    before: Sums
    after: Sums
    samples: float
    seconds: float = 0.0  # simulated
    senders: int = 0  # devices that sent something
    ordered: int = 0  # devices that received an order
    restored: tuple[str, ...] = ()  # devices whose new state was not finite, so they keep the old one
    rare: int = 0  # metrics that too few devices measured to be told of
    without_loss: int = 0  # devices whose update was used and whose loss is not finite


def play(
    parts: Round,
    server: ServerState,
    devices: Devices,
    population: Population,
    *,
    judges: bool = False,
    strict: bool = True,
    on_answer: Callable[[int, int], None] = lambda done, given: None,
) -> RoundResult:
    """Play one round.

    `strict`: raise a Mistake if no device's update can be used; otherwise the weights then stay as they are.
    `on_answer` is called as devices answer, with the number of answers so far and the number of devices that were given
    an order.
    """
    totals, server = RoundTotals(parts.statistics), parts.begin(server, population)
    state = server.state

    def arriving() -> Iterator[Updates]:
        nonlocal state
        groups = parts.choose(server, population)
        for group in groups:
            order = replace(parts.order(server, group), judges=judges)
            totals.count_orders(order, group)
            for arrived in devices.work(order, group.names):
                totals.missing.extend(arrived.missing)
                totals.rejected.extend(arrived.rejected)
                totals.restored.extend(arrived.restored)
                totals.seconds = max(totals.seconds, arrived.seconds)
                on_answer(totals.answer_count, totals.given)
                if arrived.sent is not None:
                    totals.count_sent(arrived.sent)
                    # The next group's devices may send through the same memory
                    sent = arrived.sent.copy() if len(groups) > 1 else arrived.sent
                    found = replace(parts.decode(order, sent), age=group.age)
                    updates = totals.accept(found, server.weights.numel())
                    if updates.names:
                        state = parts.note(state, updates, population)
                        yield updates

    combined = parts.combine(server, arriving())
    if strict:
        totals.check(server.round)
    return totals.result(advanced_server(parts, replace(server, state=state), combined, totals))


def advanced_server(parts: Round, server: ServerState, combined: Combined, totals: RoundTotals) -> ServerState:
    """The server after the round."""
    after = parts.advance(server, combined)
    state = {name: with_own_memory(value) for name, value in after.state.items()}
    after = replace(after, round=server.round + 1, drawn={}, state=state)
    if totals.statistics and combined.weight:
        rows, counts = (torch.cat(some) for some in zip(*totals.statistics, strict=True))
        after = replace(after, statistics=parts.settle(parts.statistics, rows, counts))
    return after


def with_own_memory(value: Tensor) -> Tensor:
    """The tensor, copied if it is a part of a larger one, such as of what devices sent."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


class RoundTotals:
    """Counts and sums of a round, collected while updates arrive."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout  # of the statistics that devices send
        self.statistics: list[tuple[Tensor, Tensor]] = []  # (statistics, sample counts) of every chunk
        self.names: list[str] = []
        self.missing: list[str] = []
        self.rejected: list[RejectedDevice] = []
        self.restored: list[str] = []
        self.up = self.down = self.senders = self.given = 0
        self.loss = self.samples = self.seconds = 0.0
        self.loss_samples, self.without_loss = 0.0, 0  # samples behind `loss`; devices whose loss is not finite
        self.before: dict[str, tuple[float, float]] = {}
        self.after: dict[str, tuple[float, float]] = {}
        self.measured: Counter[str] = Counter()  # devices by metric

    @property
    def answer_count(self) -> int:
        """Devices that answered, failed or are known to be missing."""
        return len(self.names) + len(self.missing) + len(self.rejected)

    def count_orders(self, order: Order, group: DeviceGroup) -> None:
        self.down += order.bytes * len(group.names)
        self.given += len(group.names)

    def count_sent(self, sent: EncodedUpdates) -> None:
        self.up += sent.bytes * len(sent.header.names)
        self.senders += len(sent.header.names)

    def accept(self, updates: Updates, size: int) -> Updates:
        """Drop the updates that can't be used, note why, and return the others: the round goes on without the bad ones."""
        wrong = [
            why or beside
            for why, beside in zip(
                update_problems(updates, size),
                statistics_problems(self.layout, updates.statistics, len(updates.names)),
                strict=True,
            )
        ]
        self.rejected.extend(RejectedDevice(name, why) for name, why in zip(updates.names, wrong, strict=True) if why)
        keep = [place for place, why in enumerate(wrong) if not why]
        good = updates if len(keep) == len(updates.names) else updates.select(keep)
        self.names.extend(good.names)
        if good.statistics is not None and good.names:
            self.statistics.append((good.statistics, good.counts))
        self.samples += float(good.counts.sum())
        known = good.losses.isfinite()
        self.loss += float((good.counts * good.losses)[known].sum())
        self.loss_samples += float(good.counts[known].sum())
        self.without_loss += int((~known).sum())
        for totals, found in ((self.before, good.before), (self.after, good.after)):
            for sums in found:
                add_sums(totals, sums)
        self.measured.update(name for sums in good.before for name in sums)
        return good

    def check(self, number: int) -> None:
        """Raise a Mistake if every device failed: then the fault is the job's, not a device's."""
        if self.given and not self.names and len(self.rejected) == self.given:
            what = "updates" if self.senders else "work"
            raise Mistake(
                f"the {what} of all {self.given} devices of round {number + 1} failed: "
                f"{count_kinds(one.why for one in self.rejected)}"
            )

    def result(self, server: ServerState) -> RoundResult:
        loss = self.loss / self.loss_samples if self.loss_samples else float("nan")
        common = common_metrics(self.measured)
        return RoundResult(
            server,
            tuple(self.names),
            tuple(self.missing),
            tuple(self.rejected),
            loss,
            self.up,
            self.down,
            {name: value for name, value in self.before.items() if name in common},
            {name: value for name, value in self.after.items() if name in common},
            self.samples,
            self.seconds,
            self.senders,
            self.given,
            tuple(self.restored),
            len({*self.before, *self.after} - common),
            self.without_loss,
        )


def common_metrics(measured: Mapping[str, int]) -> set[str]:
    """The metrics that enough devices measured: a metric of a few may be named after their records.

    >>> sorted(common_metrics({"loss": 6, "accuracy": 5, "errors of Ada": 1}))
    ['accuracy', 'loss']
    """
    least = min(COMMON, -(-max(measured.values(), default=0) // 2))
    return {name for name, devices in measured.items() if devices >= least}


def add_sums(totals: dict[str, tuple[float, float]], sums: Sums) -> None:
    for name, (value, weight) in sums.items():
        before = totals.get(name, (0.0, 0.0))
        totals[name] = (before[0] + value, before[1] + weight)


def update_problems(updates: Updates, size: int) -> list[str]:
    """For every device, why its update is rejected; empty if it is accepted."""
    if updates.rows.shape[1:] != (size,):
        return [f"its update has the shape {tuple(updates.rows.shape[1:])}, not {(size,)}"] * len(updates.names)
    counted = updates.counts.isfinite() & (updates.counts > 0)
    return [
        why or ("" if good else "it says that it has no sample, or no finite number of them")
        for why, good in zip(nonfinite_problems(updates), counted.tolist(), strict=True)
    ]


def nonfinite_problems(updates: Updates) -> list[str]:
    """For every device, which part of its update is not finite; empty if all of it is."""
    beside = [one.unsqueeze(-1).flatten(1) for one in updates.extras.values() if one.is_floating_point()]
    checks = (
        (rows_are_finite(updates.rows), "its update has numbers that are not finite"),
        *((rows_are_finite(one), "what it sends beside its update has numbers that are not finite") for one in beside),
        *(
            (rows_are_finite(one), "its statistics have numbers that are not finite")
            for one in (updates.statistics,)
            if one is not None
        ),
    )
    found = [""] * len(updates.names)
    for good, why in reversed(checks):
        for place in (~good).nonzero().flatten().tolist():
            found[place] = why
    return found


def rows_are_finite(rows: Tensor) -> Tensor:
    """A mask of the rows that have only finite numbers.

    A row's sum shows it at a sixth of the price of testing every number. If the sum overflows, every number is tested.
    """
    found = rows.sum(dim=1).isfinite()
    for place in (~found).nonzero().flatten().tolist():
        found[place] = rows[place].isfinite().all()
    return found
