"""q-FedAvg: devices on which the model is bad count more, so that it becomes about as good on all of them.

    minimises   sum_i p_i F_i(w)^(q + 1) / (q + 1)

    g_i     =  L (w - w_i)
    h_i     =  q F_i(w)^(q - 1) |g_i|^2  +  L F_i(w)^q
    w      <-  w  -  sum_i p_i F_i(w)^q g_i  /  sum_i p_i h_i

    F_i     mean loss of the weights w that device i was given, on the samples that it trains on
    w_i     its weights after its work
    L       Lipschitz constant of the gradients, estimated as 1 / (rate of the device's SGD)
    p_i     its samples

The paper draws device i with a chance that goes with p_i and then takes devices alike; here all are drawn alike and weigh p_i, which has
the same expectation. q = 0 is FedAvg, to rounding.
F_i is measured before the work, as the loss of one step with all samples that is then thrown away: another pass over a device's records
(at most twice the work: with epochs=1), and 8 bytes more to send. It is the loss while training, dropout included. 0 counts as 1e-10.
Li, Sanjabi, Beirami, Smith 2020, Fair Resource Allocation in Federated Learning, arXiv 1905.10497, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.round import Combined, DeviceView, Objective, Order, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost

LOSS = "QFedAvg.loss"  # (k) float64, sent along: the loss before the work
LEAST = 1e-10  # a loss of 0 to the power q - 1 would be infinite


@dataclass(frozen=True)
class QFedAvg(FederatedTechnique):
    """Give devices with a higher loss more weight.

    Costs: another pass over a device's records and 8 bytes more to send; the mean loss may rise.

    Not for: private federations: it sends every device's loss without noise. Nor where malicious devices may claim
    a high loss.
    """

    q: float = 1.0  # 0: by samples alone; the larger, the more alike the devices' losses become
    lipschitz: float = 0.0  # 0: 1 / (rate of the device's SGD)

    why: ClassVar[str] = "devices with a higher loss count more: fair to all"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50

    def __post_init__(self) -> None:
        for name in ("q", "lipschitz"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise Mistake(f"QFedAvg({name}={getattr(self, name)}): give a finite number, 0 or more")

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[QFedAvg, ...]:
        return ()

    def refusal(self, cost: RoundCost) -> str:
        if not cost.delta:
            return ""
        return "an epsilon is asked for, and every device would send its loss without noise: leave out QFedAvg, or --epsilon and --delta"

    def exactness(self, cost: RoundCost) -> Exactness:
        return Exactness.CHANGED if self.q else Exactness.ROUNDING

    def cost(self, cost: RoundCost) -> RoundCost:
        return replace(cost, up=cost.up + 8, device_seconds=2 * cost.device_seconds)

    def apply(self, round: Round) -> Round:
        if round.local.optimizer is not None and not self.lipschitz:
            raise Mistake(
                "QFedAvg takes 1 / (rate of the device's SGD) for the Lipschitz constant, and devices have an optimizer (the "
                "Job's or its Local's): give QFedAvg(lipschitz=...), or Local(lr=...) without an optimizer"
            )
        constant = self.lipschitz or 1.0 / round.local.rate

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = loss_before(round, order, devices, objective)
            updates = round.work(order, devices, objective)
            return replace(updates, extras={**updates.extras, LOSS: found})

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            totals = RunningTotals()
            for updates in arriving:
                totals.add(updates, self.q, constant)
            return totals.combined(server, self.q)

        return round.with_(work=work, combine=combine)


def loss_before(round: Round, order: Order, devices: Sequence[DeviceView], objective: Objective) -> Tensor:
    """Of the given weights, on what each device trains on. What techniques keep on devices stays as it is."""
    step = replace(objective.local, epochs=1, batch=0, steps=1, optimizer=None)
    apart = [replace(device, state={name: value.clone() for name, value in device.state.items()}) for device in devices]
    return round.work(replace(order, judges=False), apart, replace(objective, local=step)).losses


class RunningTotals:
    """Of what arrived so far, in 64 bits: powers of losses differ by more than 32 bits hold."""

    def __init__(self) -> None:
        self.moved = torch.zeros(0, dtype=torch.float64)  # sum of p F^q g (size)
        self.curved = self.samples = 0.0  # sum of p h, and of p

    def add(self, updates: Updates, q: float, constant: float) -> None:
        losses, counts = checked(updates).clamp(min=LEAST), updates.counts
        length = torch.linalg.vector_norm(updates.rows, dim=1, dtype=torch.float64).square() * constant**2  # |g|^2
        self.moved = plus(self.moved, weighted_sum(-constant * counts * losses**q, updates.rows))
        self.curved += float((counts * (q * losses ** (q - 1) * length + constant * losses**q)).sum())
        self.samples += float(counts.sum())

    def combined(self, server: ServerState, q: float) -> Combined:
        if not self.samples:
            return Combined(torch.zeros_like(server.weights))
        update = -self.moved / self.curved
        if not bool(torch.isfinite(update).all()):
            raise Mistake(
                f"QFedAvg(q={q:g}): losses of round {server.round + 1} to this power are too large or too small for 64 bits; "
                f"give a smaller q"
            )
        return Combined(update.to(server.weights.dtype), weight=self.samples)


def checked(updates: Updates) -> Tensor:
    losses = updates.extras[LOSS]
    for name, loss in zip(updates.names, losses.tolist(), strict=True):
        if loss < 0:
            raise Mistake(
                f"QFedAvg: the client {name!r} has a loss of {loss:g}, and a power of a negative one is no weight: give the job "
                f"a loss that is 0 or more"
            )
    return losses


def plus(total: Tensor, part: Tensor) -> Tensor:
    return total + part if len(total) else part


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Of 32-bit rows with 64-bit weights, whatever their size: the largest weight is 1 while rows are added."""
    largest = weights.abs().max()
    return ((weights / largest).to(rows.dtype) @ rows).double() * largest
