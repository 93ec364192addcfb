"""The mesh: the axes along which the workers of a group are arranged, with a link for each.

    data     workers train the same weights on different samples
    stage    workers hold different layers
    tensor   workers hold different parts of the same layers

Ranks count along the last axis first, so with {"data": 2, "stage": 3} the workers 0, 1, 2 differ only in their stage,
and 0 and 3 only in their samples. Workers that differ in one axis only form a *line*; a link along an axis connects the
workers of one line.

Contract: Every axis with more than one worker has exactly one technique that `unites` along it. All workers send the
same things in the same order, and what they agree on after a step (to stop, to save) is decided by all at once. The
first worker writes, and a checkpoint is that of one process (tests/core/workers/test_mesh.py, decisions/008).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shoestring.core.workers.coordinates import coordinates
from shoestring.core.workers.link import Link
from shoestring.core.workers.sum_costs import Speeds


@dataclass(frozen=True)
class Mesh:
    """One worker's position in the mesh. Made by `on_one_axis` and `imagined_mesh`; for processes by
    `training/links/process_mesh`."""

    link: Link  # to all workers
    axes: Mapping[str, Link]  # per axis, to the workers of this one's line

    def __post_init__(self) -> None:
        own = {axis: link.rank for axis, link in self.axes.items()}
        assert prod(self.sizes.values()) == self.link.world, f"{self.sizes} are not {self.link.world} workers"
        assert self.coordinates(self.link.rank) == own, (
            f"worker {self.link.rank} of {self.sizes} does not stand at {own}"
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Workers along every axis."""
        return {axis: link.world for axis, link in self.axes.items()}

    @property
    def world(self) -> int:
        return self.link.world

    def along(self, axis: str) -> Link:
        """The link to workers that differ from this one only in this axis; a link to nobody if the mesh lacks the
        axis."""
        return self.axes[axis] if axis in self.axes else Link()

    def coordinates(self, rank: int) -> dict[str, int]:
        return coordinates(self.sizes, rank)

    def rank_at(self, place: Mapping[str, int]) -> int:
        return rank_at(self.sizes, place)

    @property
    def drawing_alike(self) -> int:
        """Number of consecutive ranks that draw the same random numbers: a line along tensor, which differs only in
        split layers."""
        assert list(self.axes)[-1] == "tensor" or self.along("tensor").world == 1, "ranks count along tensor first"
        return self.along("tensor").world

    @property
    def draws_as(self) -> int:
        """This worker's number among those that draw different random numbers."""
        return self.link.rank // self.drawing_alike

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent so far, over all links."""
        links = {id(link): link for link in (self.link, *self.axes.values())}
        return sum(link.sent for link in links.values())


def rank_at(sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """The rank of the worker at these coordinates.

    >>> rank_at({"data": 2, "stage": 3}, {"data": 1, "stage": 1})
    4
    """
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place[axis]
    return rank


def lines(sizes: Mapping[str, int], axis: str) -> list[list[int]]:
    """All lines along an axis: every worker is in one of them.

    >>> lines({"data": 2, "stage": 3}, "data")
    [[0, 3], [1, 4], [2, 5]]
    """
    places = [coordinates(sizes, rank) for rank in range(prod(sizes.values()))]
    return [
        [rank_at(sizes, {**place, axis: number}) for number in range(sizes[axis])]
        for place in places
        if place[axis] == 0
    ]


def on_one_axis(link: Link | None = None, axis: str = "data") -> Mesh:
    """The mesh of workers on a single axis; without a link, of one worker alone."""
    only = link or Link()
    return Mesh(only, {axis: only})


def imagined_mesh(
    sizes: Mapping[str, int], rank: int = 0, same_machine: bool = False, speeds: Speeds | None = None
) -> Mesh:
    """The mesh of a worker in an imagined group: nothing is sent, everything is counted, along every axis."""
    link = Link(rank, prod(sizes.values()), same_machine, speeds=speeds)
    places = coordinates(sizes, rank)
    axes = {
        axis: link
        if size == link.world
        else Link(places[axis], size, same_machine, speeds=speeds, line=own_line(sizes, axis, rank))
        for axis, size in sizes.items()
    }
    return Mesh(link, axes)


def own_line(sizes: Mapping[str, int], axis: str, rank: int) -> list[int]:
    """The line of one worker along an axis.

    >>> own_line({"data": 2, "stage": 3}, "data", 4)
    [1, 4]
    """
    place = coordinates(sizes, rank)
    return [rank_at(sizes, {**place, axis: number}) for number in range(sizes[axis])]
