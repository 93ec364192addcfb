"""QuantizeDown: devices receive weights quantized to 8 or 4 bits, and train from those.

    given = low + step round((w - low) / step),  in blocks          w  <-  w + the mean of (w_i - given)

The server keeps exact weights, so rounding errors do not accumulate over rounds. Rounding is to the nearest level, so
all devices begin from the same weights. How much a device's update changes depends on its gradients and is not known.
The stated error is |given - w|^2 / |w|^2 for normally distributed weights, where a block of n has a range of 2 sqrt(2
ln n) standard deviations:

    (2 sqrt(2 ln n) / L)^2 / 12          L = 2^bits - 1

Caldas, Konečný, McMahan, Talwalkar 2018, Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements, arXiv 1812.07210.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
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
from shoestring.federated.techniques.send.levels import levels_bytes, pack_levels, unpack_levels
from shoestring.numerics.block_quantization import affine_codes, affine_ranges, affine_values

NONE, LOW, STEP = "QuantizeDown.none", "QuantizeDown.low", "QuantizeDown.step"


@dataclass(frozen=True)
class QuantizeDown(FederatedTechnique):
    """Send devices weights of 8 or 4 bits.

    Costs: devices begin from rounded weights, and their updates differ accordingly.

    Not for: budgets of upload, of which it saves nothing.
    """

    bits: int = 8  # per weight: 8 or 4
    block: int = 1024  # weights that share a range, which takes 8 bytes

    why: ClassVar[str] = "fewer bits per weight on the way down"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "down"
    order: ClassVar[int] = 46

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise Mistake(f"bits={self.bits!r} in QuantizeDown: fewer than 4 bits change a model too much; give 8 or 4")
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

    def quantize_order(self, order: Order) -> Order:
        weights = order.weights[None]
        low, step = affine_ranges(weights, self.bits, self.block)
        whole, none = pack_levels(affine_codes(weights, low, step, self.bits, self.block, 0.5), self.bits)
        return replace(order, weights=whole[0], extras={**order.extras, NONE: none[0], LOW: low[0], STEP: step[0]})

    def dequantize_order(self, order: Order) -> Order:
        """The order with dequantized weights, as the parts below this technique expect it. Other orders stay as they
        are."""
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
                    f"the weights of round {server.round + 1} are not finite, so they can't be quantized: training diverged; a "
                    f"lower learning rate or a robust aggregation rule may help"
                )
            return self.quantize_order(made)

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            return subject.work(self.dequantize_order(order), devices, objective)

        def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> EncodedUpdates:
            return subject.encode(self.dequantize_order(order), devices, updates)

        def decode(order: Order, sent: EncodedUpdates) -> Updates:
            return subject.decode(self.dequantize_order(order), sent)

        return subject.with_(order=order, work=work, encode=encode, decode=decode)
