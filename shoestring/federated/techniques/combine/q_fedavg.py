"""q-FedAvg: fair aggregation. Devices with a higher loss have more weight, so that the model becomes about as good on
all of them.

    minimises   sum_i p_i F_i(w)^(q + 1) / (q + 1)

    g_i     =  L (w - w_i)
    h_i     =  q F_i(w)^(q - 1) |g_i|^2  +  L F_i(w)^q
    w      <-  w  -  sum_i p_i F_i(w)^q g_i  /  sum_i p_i h_i

    F_i     mean loss of the round's weights w on the training samples of device i
    w_i     weights of device i after local training
    L       Lipschitz constant of the gradients, estimated as 1 / (learning rate of the device's SGD)
    p_i     number of samples of device i

The paper samples device i with a probability proportional to p_i and weights devices equally; here devices are sampled
uniformly and weighted by p_i, which has the same expectation. q = 0 is FedAvg, to rounding. F_i is the loss of one
full-batch step that is then discarded: another pass over a device's records (at most twice the work, with epochs=1),
and 8 more bytes to send. It is the training loss, dropout included. A loss of 0 counts as 1e-10.
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

LOSS = "QFedAvg.loss"  # key of the loss before local training, (k) float64, sent along
LEAST = 1e-10  # a loss of 0 to the power q - 1 would be infinite


@dataclass(frozen=True)
class QFedAvg(FederatedTechnique):
    """Give devices with a higher loss more weight.

    Costs: another pass over a device's records and 8 bytes more to send; the mean loss may rise.

    Not for: private federations: it sends every device's loss without noise. Nor where malicious devices may claim
    a high loss.
    """

    q: float = 1.0  # 0: weights by samples alone; the larger, the more alike the devices' losses become
    lipschitz: float = 0.0  # 0: 1 / (learning rate of the device's SGD)

    why: ClassVar[str] = "devices with a higher loss have more weight: fair to all"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("q", "lipschitz"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise Mistake(f"QFedAvg({name}={getattr(self, name)}): give a finite number, 0 or more")

    def refusal(self, cost: RoundCost) -> str:
        if not cost.delta:
            return ""
        return "with QFedAvg every device sends its loss, which no noise covers: leave out QFedAvg, or --epsilon and --delta"

    def exactness(self, cost: RoundCost) -> Exactness:
        return Exactness.CHANGED if self.q else Exactness.ROUNDING

    def cost(self, cost: RoundCost) -> RoundCost:
        return replace(cost, up=cost.up + 8, device_seconds=2 * cost.device_seconds)

    def apply(self, round: Round) -> Round:
        if round.local.optimizer is not None and not self.lipschitz:
            raise Mistake(
                "QFedAvg estimates the Lipschitz constant as 1 / (learning rate of the device's SGD), and devices have an optimizer "
                "(the Job's or its Local's): give QFedAvg(lipschitz=...), or Local(lr=...) without an optimizer"
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
            return totals.combine(server, self.q)

        return round.with_(work=work, combine=combine)


def loss_before(round: Round, order: Order, devices: Sequence[DeviceView], objective: Objective) -> Tensor:
    """Loss of the round's weights on every device's training samples. The devices' state stays as it is."""
    step = replace(objective.local, epochs=1, batch=0, steps=1, optimizer=None)
    apart = [replace(device, state={name: value.clone() for name, value in device.state.items()}) for device in devices]
    return round.work(replace(order, judges=False), apart, replace(objective, local=step)).losses


class RunningTotals:
    """Sums over the updates so far, in 64 bits: powers of losses exceed the range of 32 bits."""

    def __init__(self) -> None:
        self.moved = torch.zeros(0, dtype=torch.float64)  # sum of p F^q g (size)
        self.curved = self.samples = 0.0  # sum of p h, and of p

    def add(self, updates: Updates, q: float, constant: float) -> None:
        losses, counts = nonnegative_losses(updates).clamp(min=LEAST), updates.counts
        length = torch.linalg.vector_norm(updates.rows, dim=1, dtype=torch.float64).square() * constant**2  # |g|^2
        self.moved = add_or_start(self.moved, weighted_sum(-constant * counts * losses**q, updates.rows))
        self.curved += float((counts * (q * losses ** (q - 1) * length + constant * losses**q)).sum())
        self.samples += float(counts.sum())

    def combine(self, server: ServerState, q: float) -> Combined:
        if not self.samples:
            return Combined(torch.zeros_like(server.weights))
        update = -self.moved / self.curved
        if not bool(torch.isfinite(update).all()):
            raise Mistake(
                f"QFedAvg(q={q:g}): losses of round {server.round + 1} to this power overflow or underflow 64 bits; give a smaller q"
            )
        return Combined(update.to(server.weights.dtype), weight=self.samples)


def nonnegative_losses(updates: Updates) -> Tensor:
    """The devices' losses; a Mistake if one is negative."""
    losses = updates.extras[LOSS]
    for name, loss in zip(updates.names, losses.tolist(), strict=True):
        if loss < 0:
            raise Mistake(
                f"QFedAvg: the client {name!r} has a loss of {loss:g}, and a power of a negative loss is no weight: give the job "
                f"a loss that is never negative"
            )
    return losses


def add_or_start(total: Tensor, part: Tensor) -> Tensor:
    return total + part if len(total) else part


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Weighted sum of 32-bit rows with 64-bit weights of any size: weights are scaled so that the largest is 1 during
    the sum."""
    largest = weights.abs().max()
    return ((weights / largest).to(rows.dtype) @ rows).double() * largest
