"""The mesh of real processes: one process group for every line of workers along an axis."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch import distributed as dist

from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import Mesh, lines
from shoestring.training.links.shared_memory_link import join_link


def joined_mesh(link: Link, sizes: Mapping[str, int], same_machine: bool = True) -> Mesh:
    """This process's mesh, made from its link to all workers; every process calls it with the same sizes.

    An axis that contains all workers uses that same link; an axis with one worker needs none.
    """
    own: dict[str, tuple[list[int], dist.ProcessGroup]] = {}
    for axis, size in sizes.items():
        for line in lines(sizes, axis) if 1 < size < link.world else ():
            group = dist.new_group(
                line, timeout=timedelta(seconds=link.deadline)
            )  # new_group must be called by all processes, in the same order
            if link.rank in line:
                own[axis] = line, group
    axes: dict[str, Link] = {}
    for axis, size in sizes.items():
        if axis in own:
            line, group = own[axis]
            axes[axis] = join_link(line.index(link.rank), size, same_machine, link.deadline, group, link.speeds, line)
        else:
            axes[axis] = link if size == link.world else Link()
    return Mesh(link, axes)
