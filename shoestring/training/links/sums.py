"""All-reduce by messages: carries out the rounds of core/workers/sums.py over a link."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoestring.core.workers.link import Sending
from shoestring.core.workers.sum_costs import AllReduceTable
from shoestring.core.workers.sums import Receive, rounds


class Carrier(Protocol):
    """The methods that a link must have for that."""

    rank: int
    sums: AllReduceTable

    def begin_part(self, part: Tensor, to: int) -> Sending: ...

    def begin_to_receive(self, part: Tensor, source: int) -> Sending: ...


def add_up(link: Carrier, tensor: Tensor, way: str, room: Tensor) -> None:
    """Sum a contiguous tensor over the link's workers, in place; `room` receives the incoming parts.

    All sends of a round are begun before anything is waited for, so no deadlock is possible; receives are posted before
    the sends, because a sender whose receiver waits already need not ask. Every wait has the link's deadline, and a
    lost worker shows as PeerLost.
    """
    flat = tensor.detach().view(-1)

    def expect(one: Receive) -> Sending:
        return link.begin_to_receive(room[: one.end - one.begin] if one.adds else flat[one.begin : one.end], one.source)

    for each in rounds(way, link.rank, link.sums.machines, len(flat)):
        coming = [expect(one) for one in each.receives[:1]]
        sendings = [link.begin_part(flat[one.begin : one.end], one.to) for one in each.sends]
        for number, one in enumerate(each.receives):
            coming.pop().wait()
            if one.adds:
                flat[one.begin : one.end].add_(room[: one.end - one.begin])
            coming = [expect(after) for after in each.receives[number + 1 : number + 2]]
        for sending in sendings:
            sending.wait()
