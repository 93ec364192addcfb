"""TopK: only the largest numbers of an update are sent; the device keeps what it left out and adds it to its next update.

    sent = top_k(update + left)          left <- update + left - sent

Biased: what is left out is late, not lost (error feedback). By then others have moved the weights, and a device that never takes part
again never sends it. |error|^2 = the squares of the smallest n - k numbers. Of equals, those that stand first are sent.
Stich, Cordonnier, Jaggi 2018, Sparsified SGD with Memory, arXiv 1809.07599; Karimireddy, Rebjock, Stich, Jaggi 2019, Error Feedback Fixes
SignSGD, arXiv 1901.09847.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.plain import VALUES
from shoestring.federated.round import Device, Order, Round, Sent, Updates
from shoestring.federated.send.coding import coded, device_noise
from shoestring.federated.send.places import Placed, marks, placed, shortest
from shoestring.federated.technique import FederatedTechnique, RoundCost

SHARES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
PLACES, COUNTS, LEFT = "TopK.places", "TopK.counts", "TopK.left"


@dataclass(frozen=True)
class TopK(FederatedTechnique):
    share: float = 0.01   # of the numbers, that is sent

    why: ClassVar[str] = "only the largest numbers on the way up, the others later"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "sparse"
    order: ClassVar[int] = 40

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise Mistake(f"share={self.share!r} in TopK: it is the share of the numbers that is sent; give more than 0 and less than 1")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[TopK, ...]:
        return tuple(one for one in map(cls, SHARES) if one.share * cost.values >= 1 and one.bytes(cost.values) < 4 * cost.values)

    def refusal(self, cost: RoundCost, /) -> str:
        return device_noise(cost)

    def count(self, size: int) -> int:
        """Numbers that are sent."""
        return min(max(round(self.share * size), 1), size)

    def bytes(self, size: int) -> int:
        """Of them and of where they stand."""
        return 4 * self.count(size) + shortest(self.count(size), size)[0]

    def drift(self, cost: RoundCost, /) -> float:
        count = self.count(cost.values)
        if cost.evidence is None:
            return 1 - count / cost.values   # all numbers alike: the worst there is
        return left_out(cost.evidence.update, count)

    def cost(self, cost: RoundCost, /) -> RoundCost:
        count = self.count(cost.values)
        evidence = cost.evidence and replace(cost.evidence, update=largest(cost.evidence.update, count))
        return coded(replace(cost, values=count, up=cost.up - 4 * cost.values + self.bytes(cost.values), evidence=evidence,
                             device_bytes=cost.device_bytes + 4 * cost.values), self.drift(cost))

    def apply(self, subject: Round, /) -> Round:
        def encode(order: Order, devices: Sequence[Device], updates: Updates) -> Sent:
            sent = subject.encode(order, devices, updates)
            rows, kept = sent.payload[VALUES].clone(), torch.zeros(sent.payload[VALUES].shape, dtype=torch.bool)
            count, there = self.count(rows.shape[1]), {device.name: device for device in devices}
            for row, chosen, name in zip(rows, kept, sent.told.names, strict=True):
                state = there[name].state
                if LEFT in state and state[LEFT].shape == row.shape:
                    row += state[LEFT]
                chosen.copy_(top(row, count))
                if bool(row.isfinite().all()):
                    state[LEFT] = row.masked_fill(chosen, 0.0)
                else:
                    row.fill_(torch.nan)   # so that it is rejected, whatever would be sent of it; what is left is still that of before
            places, counts = placed(kept, count)
            return replace(sent, payload={**sent.payload, VALUES: rows[kept].view(len(rows), count), PLACES: places, COUNTS: counts})

        def decode(order: Order, sent: Sent) -> Updates:
            payload, size = dict(sent.payload), order.weights.numel()
            found = Placed(payload.pop(PLACES), payload.pop(COUNTS))
            kept, good = marks(found, self.count(size), size)
            values = torch.where(good[:, None], payload.pop(VALUES), torch.nan)   # what makes no sense is rejected
            rows = torch.zeros(len(values), size).masked_scatter_(kept, values)
            return subject.decode(order, replace(sent, payload={**payload, VALUES: rows}))

        return subject.with_(encode=encode, decode=decode)


def top(row: Tensor, count: int) -> Tensor:
    """Marks of the `count` largest magnitudes, the first ones of equals; of a row that is not finite the first ones."""
    if not bool(row.isfinite().all()):
        return torch.arange(len(row)) < count
    sizes = row.abs()
    least = sizes.topk(count).values[-1]
    kept = sizes > least
    kept[(sizes == least).nonzero().flatten()[:count - int(kept.sum())]] = True
    return kept


@lru_cache(maxsize=32)
def largest(update: Tensor, count: int) -> Tensor:
    """What is sent of an update, in its order; once for a tensor."""
    return update[top(update, count)]


def left_out(update: Tensor, count: int) -> float:
    """|error|^2 / |update|^2."""
    whole = float(update.double().square().sum())
    return max(1 - float(largest(update, count).double().square().sum()) / whole, 0.0) if whole else 0.0
