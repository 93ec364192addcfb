"""QuantizeDown: devices are given weights of 8 or 4 bits, and begin from those.

    given = low + step round((w - low) / step),  in blocks          w  <-  w + the mean of (w_i - given)

The server keeps its weights whole, so what rounding takes away does not add up from round to round; it is always to the nearest level, so
all devices begin from the same weights. A device's update differs by as much as its gradients do at weights so near: no formula knows that;
stated is |given - w|^2 / |w|^2 for weights of a normal distribution, whose block of n has a range of 2 sqrt(2 ln n) deviations:

    (2 sqrt(2 ln n) / L)^2 / 12          L = 2^bits - 1

Caldas, Konečný, McMahan, Talwalkar 2018, Expanding the Reach of Federated Learning by Reducing Client Resource Requirements, arXiv
1812.07210.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.federated.round import DeviceGroup, DeviceView, Objective, Order, Round, Sent, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.send.levels import levels_bytes, pack_levels, unpack_levels
from shoestring.numerics.block_quantization import affine_codes, affine_ranges, affine_values

NONE, LOW, STEP = "QuantizeDown.none", "QuantizeDown.low", "QuantizeDown.step"


@dataclass(frozen=True)
class QuantizeDown(FederatedTechnique):
    """Send devices weights of 8 or 4 bits.

    Costs: devices begin from rounded weights, and their updates differ accordingly.

    Not for: budgets of upload, of which it saves nothing.
    """

    bits: int = 8  # of a weight: 8 or 4
    block: int = 1024  # weights with a range of their own, which takes 8 bytes

    why: ClassVar[str] = "fewer bits a weight on the way down"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "down"
    order: ClassVar[int] = 46

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise Mistake(
                f"bits={self.bits!r} in QuantizeDown: with fewer bits than 4 no model is itself any more; give 8 or 4"
            )
        if not isinstance(self.block, int) or self.block < 2:
            raise Mistake(f"block={self.block!r} in QuantizeDown: a block of one weight has no range; give 2 or more")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[QuantizeDown, ...]:
        return cls(8), cls(4)

    def drift(self, cost: RoundCost, /) -> float:
        block = max(min(self.block, cost.size), 2)
        return 8 * log(block) / (12 * ((1 << self.bits) - 1) ** 2)

    def cost(self, cost: RoundCost, /) -> RoundCost:
        saved = 4 * cost.size - levels_bytes(cost.size, self.bits, self.block)
        return replace(cost, down=cost.down - saved, error=cost.error + self.drift(cost))

    def coded(self, order: Order) -> Order:
        weights = order.weights[None]
        low, step = affine_ranges(weights, self.bits, self.block)
        whole, none = pack_levels(affine_codes(weights, low, step, self.bits, self.block, 0.5), self.bits)
        return replace(order, weights=whole[0], extras={**order.extras, NONE: none[0], LOW: low[0], STEP: step[0]})

    def decoded(self, order: Order) -> Order:
        """The order as what was there before the coding knows it; one that was never coded stays as it is."""
        if LOW not in order.extras:
            return order
        extras = dict(order.extras)
        found = unpack_levels(order.weights[None], extras.pop(NONE)[None], self.bits)
        weights = affine_values(found, extras.pop(LOW)[None], extras.pop(STEP)[None], self.block)[0]
        return replace(order, weights=weights, extras=extras)

    def apply(self, subject: Round, /) -> Round:
        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            if not bool(torch.isfinite(made.weights).all()):
                raise Mistake(
                    f"the weights of round {server.round + 1} have numbers that are not finite, which have no level: training "
                    f"diverged; a lower rate or a robust rule of combination may help"
                )
            return self.coded(made)

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            return subject.work(self.decoded(order), devices, objective)

        def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> Sent:
            return subject.encode(self.decoded(order), devices, updates)

        def decode(order: Order, sent: Sent) -> Updates:
            return subject.decode(self.decoded(order), sent)

        return subject.with_(order=order, work=work, encode=encode, decode=decode)
