"""QuantizeUpdates: block-wise stochastic quantization of client updates to 2^bits levels between a block's minimum and
maximum.

    x  ->  low + step level,   level = floor((x - low) / step + u),   u uniform in [0, 1)

Unbiased: the expected decoded update is the exact one, so errors of many devices average out: E|error|^2 of their mean
is that of one device divided by their number. Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, QSGD, arXiv 1610.02132;
with a range per block as in Suresh, Yu, Kumar, McMahan 2017, Distributed Mean Estimation with Limited Communication,
arXiv 1611.00429.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.planning.evidence import cache_by_identity
from shoestring.federated.playing.plain import VALUES
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import DeviceView, EncodedUpdates, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.send.coding import (
    add_error_share,
    device_noise_refusal,
    replace_evidence,
    without_clip,
)
from shoestring.federated.techniques.send.levels import WIDTHS, levels_bytes, pack_levels, unpack_levels
from shoestring.numerics.block_quantization import (
    affine_codes,
    affine_error,
    affine_ranges,
    affine_values,
    worst_affine_error,
)

LEVELS, NONE, LOW, STEP = (
    "QuantizeUpdates.levels",
    "QuantizeUpdates.none",
    "QuantizeUpdates.low",
    "QuantizeUpdates.step",
)


@dataclass(frozen=True)
class QuantizeUpdates(FederatedTechnique):
    """Send updates with 8, 4, 2 or 1 bits a number, rounded at random.

    Costs: noise in every update, which averages out over devices, and 8 bytes a block.

    Not for: rounds of few devices with few bits: the noise does not average out.
    """

    bits: int = 8  # per number: 8, 4, 2 or 1
    block: int = 1024  # numbers that share a range, which takes 8 bytes

    why: ClassVar[str] = "fewer bits per number on the way up"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "quantize"
    order: ClassVar[int] = 44

    def __post_init__(self) -> None:
        check_levels(self.bits, self.block, "QuantizeUpdates")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[QuantizeUpdates, ...]:
        return cls(8), cls(4), cls(2)

    def refusal(self, cost: RoundCost, /) -> str:
        return device_noise_refusal(cost)

    def drift(self, cost: RoundCost, /) -> float:
        return self.cost(cost).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        saved = 4 * cost.values - levels_bytes(cost.values, self.bits, self.block)
        less = replace(cost, up=cost.up - saved)
        if cost.evidence is None:
            return add_error_share(
                less, worst_affine_error(cost.values, self.bits, self.block) / max(cost.per_round, 1)
            )
        variance = cost.evidence.variance(squared_errors(cost.evidence.values, self.bits, self.block), cost.per_round)
        return without_clip(replace_evidence(less, cost.evidence, variance))

    def apply(self, subject: Round, /) -> Round:
        def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> EncodedUpdates:
            sent = subject.encode(order, devices, updates)
            payload = dict(sent.payload)
            values = payload.pop(VALUES)
            low, step = affine_ranges(values, self.bits, self.block)
            drawn = torch.stack(
                [
                    torch.rand(values.shape[1], generator=generator_of(order.seed, "quantize", order.round, name))
                    for name in sent.header.names
                ]
            )
            whole, none = pack_levels(affine_codes(values, low, step, self.bits, self.block, drawn), self.bits)
            return replace(sent, payload={**payload, LEVELS: whole, NONE: none, LOW: low, STEP: step})

        def decode(order: Order, sent: EncodedUpdates) -> Updates:
            payload = dict(sent.payload)
            found = unpack_levels(payload.pop(LEVELS), payload.pop(NONE), self.bits)
            values = affine_values(found, payload.pop(LOW), payload.pop(STEP), self.block)
            return subject.decode(order, replace(sent, payload={**payload, VALUES: values}))

        return subject.with_(encode=encode, decode=decode)


def check_levels(bits: int, block: int, name: str) -> None:
    if bits not in WIDTHS:
        raise Mistake(
            f"bits={bits!r} in {name}: levels of {bits!r} bits do not fill bytes evenly; give {', '.join(map(str, WIDTHS))}"
        )
    if not isinstance(block, int) or block < 2:
        raise Mistake(f"block={block!r} in {name}: a block of one number has no range; give 2 or more")


@cache_by_identity
def squared_errors(values: Tensor, bits: int, block: int) -> Tensor:
    """E|quantization error|^2 of every row (m)."""
    return torch.tensor(
        [affine_error(row, bits, block) * float(row.double().square().sum()) for row in values], dtype=torch.float64
    )
