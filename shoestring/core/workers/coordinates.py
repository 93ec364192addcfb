"""A worker's coordinates in a mesh, by its rank; without importing torch, for pages."""

from __future__ import annotations

from collections.abc import Mapping


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The coordinate of a worker on each axis.

    >>> coordinates({"data": 2, "stage": 3}, 4)
    {'data': 1, 'stage': 1}
    """
    found = {}
    for axis in reversed(list(sizes)):
        rank, found[axis] = divmod(rank, sizes[axis])
    return {axis: found[axis] for axis in sizes}
