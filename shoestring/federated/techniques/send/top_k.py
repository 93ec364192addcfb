"""TopK: send only the largest numbers of an update; the device adds the rest to its next update (error feedback).

    sent = top_k(update + left)          left <- update + left - sent

Biased: what is left out is delayed, not lost (numerics/error_feedback.py). By then other devices have moved the
weights, and a device that never takes part again never sends it. |error|^2 = the sum of squares of the smallest n - k
numbers. Ties go to the first. Stich, Cordonnier, Jaggi 2018, Sparsified SGD with Memory, arXiv 1809.07599.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.planning.evidence import cache_by_identity
from shoestring.federated.playing.plain import VALUES
from shoestring.federated.round import DeviceView, EncodedUpdates, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.send.coding import (
    add_error_share,
    device_noise_refusal,
    replace_evidence,
    without_clip,
)
from shoestring.federated.techniques.send.levels import levels_bytes
from shoestring.federated.techniques.send.places import EncodedPlaces, decode_places, encode_places, shortest
from shoestring.numerics.error_feedback import update_with_error
from shoestring.numerics.top_k import top_k_mask

SHARES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
BITS, BLOCK = (8, 4, 2), 1024  # bits and block of QuantizeUpdates, which the planner combines with it
PLACES, COUNTS, LEFT = "TopK.places", "TopK.counts", "TopK.left"


@dataclass(frozen=True)
class TopK(FederatedTechnique):
    """Send only the largest numbers of an update, and keep the rest for the next one.

    Costs: 6 bytes for each number sent, and a row of numbers that every device keeps.

    Not for: devices that take part rarely: what they left out is never sent, or comes late. Not before private
    noise of devices.
    """

    share: float = 0.01  # fraction of the numbers that are sent

    why: ClassVar[str] = "only the largest numbers on the way up, the others later"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "sparse"
    order: ClassVar[int] = 40

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise Mistake(
                f"share={self.share!r} in TopK: it is the share of the numbers that is sent; give more than 0 and less than 1"
            )

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[TopK, ...]:
        """Usual shares, and those that fill the upload limit, unquantized or quantized."""
        shares = dict.fromkeys((*SHARES, *(share for bits in (32, *BITS) if (share := filling(cost, bits)))))
        return tuple(
            one
            for one in map(cls, shares)
            if one.share * cost.values >= 0.99 and one.bytes(cost.values) < 4 * cost.values
        )

    def refusal(self, cost: RoundCost, /) -> str:
        return device_noise_refusal(cost)

    def count(self, size: int) -> int:
        """Number of values that are sent."""
        return min(max(round(self.share * size), 1), size)

    def bytes(self, size: int) -> int:
        """Bytes for these values and their positions."""
        return 4 * self.count(size) + shortest(self.count(size), size)[0]

    def drift(self, cost: RoundCost, /) -> float:
        return self.cost(cost).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        count = self.count(cost.values)
        less = replace(
            cost,
            values=count,
            up=cost.up - 4 * cost.values + self.bytes(cost.values),
            device_bytes=cost.device_bytes + 4 * cost.values,
        )
        if cost.evidence is None:
            return add_error_share(less, 1 - count / cost.values)  # the worst case: all numbers have the same magnitude
        decoded, values = largest(cost.evidence.decoded, count)
        return without_clip(replace_evidence(less, replace(cost.evidence, decoded=decoded, values=values)))

    def apply(self, subject: Round, /) -> Round:
        def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> EncodedUpdates:
            sent = subject.encode(order, devices, updates)
            rows, kept = sent.payload[VALUES].clone(), torch.zeros(sent.payload[VALUES].shape, dtype=torch.bool)
            count, there = self.count(rows.shape[1]), {device.name: device for device in devices}
            for row, chosen, name in zip(rows, kept, sent.header.names, strict=True):
                state = there[name].state
                row.copy_(update_with_error(row, state.get(LEFT)))
                chosen.copy_(top_k_mask(row, count))
                if bool(row.isfinite().all()):
                    state[LEFT] = row.masked_fill(chosen, 0.0)
                else:
                    row.fill_(torch.nan)  # it will be rejected, whatever would be sent; keep the state from before
            places, counts = encode_places(kept, count)
            return replace(
                sent,
                payload={**sent.payload, VALUES: rows[kept].view(len(rows), count), PLACES: places, COUNTS: counts},
            )

        def decode(order: Order, sent: EncodedUpdates) -> Updates:
            payload, size = dict(sent.payload), order.weights.numel()
            found = EncodedPlaces(payload.pop(PLACES), payload.pop(COUNTS))
            kept, good = decode_places(found, self.count(size), size)
            values = torch.where(good[:, None], payload.pop(VALUES), torch.nan)  # an invalid message is rejected
            rows = torch.zeros(len(values), size).masked_scatter_(kept, values)
            return subject.decode(order, replace(sent, payload={**payload, VALUES: rows}))

        return subject.with_(encode=encode, decode=decode)


def filling(cost: RoundCost, bits: int) -> float:
    """The largest share whose values (at this many bits) and positions fit the upload limit; 0 if there is no limit or
    nothing fits."""
    size, room = cost.values, cost.upload - (cost.up - 4 * cost.values)

    def message_bytes(count: int) -> int:
        return shortest(count, size)[0] + (4 * count if bits == 32 else levels_bytes(count, bits, BLOCK))

    count = bisect_right(range(1, size), room, key=message_bytes) if cost.upload else 0  # `taken` is monotonic
    digits = 3
    while count and round((share := float(f"{count / size:.{digits}g}")) * size) != count:
        digits += 1  # the fewest digits that give this count
    return share if count else 0.0


@cache_by_identity
def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows (m, size) with only the largest numbers left, and these numbers alone (m, count), in order."""
    kept = torch.stack([top_k_mask(row, count) for row in rows])
    return rows * kept, rows[kept].view(len(rows), count)
