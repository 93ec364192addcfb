"""Adding up by messages: the rounds of core/sums.py, carried out over a link that sends."""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoestring.core.link import Sending
from shoestring.core.sums import Sums, rounds


class Carrier(Protocol):
    """What a link must be able to do for that."""

    rank: int
    sums: Sums

    def begin_part(self, part: Tensor, to: int) -> Sending: ...

    def receive_part(self, part: Tensor, source: int) -> None: ...


def add_up(link: Carrier, tensor: Tensor, way: str, room: Tensor) -> None:
    """Add up a contiguous tensor over the link's workers, in place; `room` takes what comes in to be added.

    Everything that a round sends is begun before anything is received, so nobody waits for one who waits for them. Every wait has the
    link's deadline, and a worker that is gone shows as PeerLost.
    """
    flat = tensor.detach().view(-1)
    for each in rounds(way, link.rank, link.sums.machines, len(flat)):
        sendings = [link.begin_part(flat[one.begin:one.end], one.to) for one in each.sends]
        for one in each.receives:
            into = flat[one.begin:one.end]
            part = room[:len(into)] if one.adds else into
            link.receive_part(part, one.source)
            if one.adds:
                into.add_(part)
        for sending in sendings:
            sending.wait()
