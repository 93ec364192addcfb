"""What the operating system reports about this process and this machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def status(field: str) -> int:
    """Bytes in a field of /proc/self/status, such as VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def touched_bytes(tensor: Tensor) -> int:
    """A tensor's bytes in pages that were touched, since other pages take no memory; all of them if the kernel does not
    tell."""
    page, address, size = os.sysconf("SC_PAGE_SIZE"), tensor.data_ptr(), tensor.nbytes
    first, stop = address // page, -(-(address + size) // page)
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(8 * first)
            used = sum(
                entry >> 7 for entry in file.read(8 * (stop - first))[7::8]
            )  # the highest bit of every page's entry: the page is present
    except OSError:
        return size
    return min(page * used, size)


def forget_peak() -> None:
    """Reset VmHWM to the present resident size, if the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def address_limit() -> int | None:
    """The limit on a process's address space in bytes; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def memory_free() -> int:
    """Bytes that a new process can use without evicting others."""
    free = memory_all()
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    return min(free, address_limit() or free)


def memory_all() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
