"""The machine that planning is told of in tests: the same figures everywhere, so that no plan depends on the speed or load of the real one,
and none measures it. Tests of measuring set a HOME of their own, in which nothing is kept."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shoestring.core.costs.hardware import Hardware, measured_group
from shoestring.core.workers.sum_costs import Rate
from shoestring.core.workers.sums import LIBRARY, MEMORY, NAIVE, RING, TREE
from shoestring.measure import probe
from shoestring.measure.process import memory_all


class Everything(set[Path]):
    """All files of measurements, as already compared with the machine."""

    def __contains__(self, path: object) -> bool:
        return True


def believe_what_is_kept() -> None:
    """In this process and its forks, take kept figures as they are, whatever the machine does meanwhile."""
    probe.BELIEVED = Everything()


def keep_figures() -> None:
    """Keep figures for processes with any number of threads."""
    before = torch.get_num_threads()
    for threads in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(threads)
        probe.remember(figures(threads))
    torch.set_num_threads(before)


BETWEEN = {  # algorithm of an all-reduce -> seconds per byte, and per message
    MEMORY: (Rate(5e-10, 1e-4, 16 << 20),),
    LIBRARY: (Rate(2e-9, 1e-3, 16 << 20),),
    RING: (Rate(2e-9, 2e-3, 16 << 20),),
    TREE: (Rate(4e-9, 2e-3, 16 << 20),),
    NAIVE: (Rate(8e-9, 1e-3, 16 << 20),),
}


def figures(threads: int) -> Hardware:
    """A machine with so many cores, alone and shared by groups of the sizes that tests have."""
    found = alone(threads)
    for count in (2, 3, 4):
        for name, memory in (("near", 2e7), ("far", 5e6)):
            ways = {way: rates for way, rates in BETWEEN.items() if name == "near" or way != MEMORY}
            found = measured_group(found, f"{count} {name}", count, ways, memory)
    return found


def alone(threads: int) -> Hardware:
    return Hardware(
        name="the machine of the tests",
        cores=threads,
        memory=memory_all(),
        torch=torch.__version__,
        flops=1e11 * threads,
        disk=4e9,
        direct=3e9,
        moving=5e-11,
        fault=4e-10,
        huge_fault=5e-11,
        tries=3,
    )
