"""The machine that planning is told of in tests: the same figures everywhere, so that no plan depends on the speed or load of the real one,
and none measures it. Tests of measuring set a HOME of their own, in which nothing is kept."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shoestring.core.hardware import Hardware
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


def figures(threads: int) -> Hardware:
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
