"""How one weight is split between workers, and how the whole is put together again for a checkpoint.

A weight is split along one dimension. That dimension may consist of several equal stretches, such as queries, keys and
values in one layer:
each stretch is divided, so that every worker has its heads of all three. If a size can't be divided evenly (a
vocabulary), the first workers get one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from shoestring.core.running.run_state import StoredTensor
from shoestring.core.workers.link import Link

CHUNK = 1 << 22  # bytes gathered at once for a checkpoint


def bounds(size: int, place: int, ways: int) -> tuple[int, int]:
    """Where the part of the worker at `place` begins and ends.

    >>> [bounds(7, place, 3) for place in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    least, more = divmod(size, ways)
    begin = place * least + min(place, more)
    return begin, begin + least + (place < more)


@dataclass(frozen=True)
class Split:
    dim: int
    stretches: int = 1

    def spans(self, size: int, place: int, ways: int) -> list[tuple[int, int]]:
        """The ranges of a dimension of this size that a worker has.

        >>> Split(0, stretches=3).spans(12, place=1, ways=2)
        [(2, 4), (6, 8), (10, 12)]
        """
        stretch = size // self.stretches
        begin, end = bounds(stretch, place, ways)
        return [(number * stretch + begin, number * stretch + end) for number in range(self.stretches)]

    def own(self, whole: Tensor, link: Link) -> Tensor:
        """A copy of this worker's part."""
        spans = self.spans(whole.shape[self.dim], link.rank, link.world)
        return torch.cat([whole.narrow(self.dim, begin, end - begin) for begin, end in spans], self.dim)


class SplitTensor:
    """A tensor of a weight's shape, of which every worker of a line holds its part. All workers must read it
    together."""

    def __init__(
        self, parameter: nn.Parameter, split: Split, shape: torch.Size, link: Link, part: Tensor | StoredTensor
    ) -> None:
        self.parameter, self.split, self.shape, self.link, self.part = parameter, split, shape, link, part
        self.dtype = part.dtype
        self.gathered = False

    def pieces(self) -> Iterator[Tensor]:
        """Its numbers in order, some rows at a time: workers put their parts into zeros and sum the bytes, which
        changes no bit."""
        self.gathered = True
        own = whole_of(self.part)
        row = prod(self.shape[1:])
        step = max(CHUNK // max(row * self.dtype.itemsize, 1), 1)
        for begin in range(0, self.shape[0], step):
            rows = own.new_zeros((min(step, self.shape[0] - begin), *self.shape[1:]))
            self.put(rows, own, begin)
            if rows.numel():
                self.link.sum(rows.view(-1).view(torch.uint8)).wait()
            yield rows.view(-1)

    def put(self, rows: Tensor, own: Tensor, begin: int) -> None:
        """Write this worker's numbers into some rows of the whole, starting with row `begin`."""
        done, end = 0, begin + len(rows)
        for start, stop in self.split.spans(self.shape[self.split.dim], self.link.rank, self.link.world):
            if self.split.dim:
                rows.narrow(self.split.dim, start, stop - start).copy_(
                    own[begin:end].narrow(self.split.dim, done, stop - start)
                )
            elif max(start, begin) < min(stop, end):
                first, last = max(start, begin), min(stop, end)
                rows[first - begin : last - begin] = own[done + first - start : done + last - start]
            done += stop - start

    def take(self, whole: Tensor) -> None:
        """Take this worker's part of a whole tensor."""
        assert isinstance(self.part, Tensor), "parts of weights are in memory"
        self.part.data.copy_(self.split.own(whole, self.link))


def whole_of(part: Tensor | StoredTensor) -> Tensor:
    """A tensor, in memory wherever it was stored."""
    return (
        part.detach()
        if isinstance(part, Tensor)
        else torch.cat([piece.clone() for piece in part.pieces()]).view(part.shape)
    )
