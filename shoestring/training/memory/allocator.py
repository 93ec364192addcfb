"""Allocator: trade time for a process that is little larger than its tensors.

glibc keeps freed memory for later, so a process can be far larger than its tensors, and what a technique saves in
tensors may never be given back to the system. Each setting is a trade:

    default    fastest for many small tensors; keeps what was freed
    pinned     every tensor above 64 KiB is mapped and unmapped on its own: the process follows the tensors, and
               each new page is paid for with a fault (about a quarter of a microsecond)
    huge       pinned, in pages of 2 MiB where they fit: fewer faults
    jemalloc, mimalloc    other libraries, where they are installed

    time     + bytes allocated per step x seconds per byte allocated
    process  + bytes allocated per step x the fraction that the allocator keeps

with both rates from the anchor step. `pinned` and `huge` are predicted to a percent or two; what the others keep
depends on every small allocation in between, so the planner tries them for a few steps before it chooses them.

Set in the environment of the worker before it starts. Exact: no number changes.
Evans: A Scalable Concurrent malloc(3) Implementation, 2006; Leijen, Zorn, de Moura: Mimalloc, 2019.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import AllocatorRates, Trait
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.technique import text
from shoestring.training.technique import TrainingTechnique

PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
LIBRARIES = {"jemalloc": "libjemalloc.so.2", "mimalloc": "libmimalloc.so.2"}
KINDS = ("default", "pinned", "huge", *LIBRARIES)


@cache
def library(name: str) -> str:
    """Path of an allocator library; empty where it is not installed."""
    places = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
    files = (os.path.join(place, LIBRARIES[name] + end) for place in places for end in ("", ".0"))
    return next((file for file in files if os.path.exists(file)), "")


@cache
def has_huge_pages() -> bool:
    """Whether the kernel gives huge pages to programs that ask for them (madvise)."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="utf-8") as file:
            return "[never]" not in file.read()
    except OSError:
        return False


def following() -> Allocator:
    """The setting on this machine whose process size follows its tensors most closely."""
    return Allocator("huge" if has_huge_pages() else "pinned")


def available_kinds() -> tuple[str, ...]:
    return tuple(kind for kind in KINDS if kind not in LIBRARIES or library(kind))


@dataclass(frozen=True)
class Allocator(TrainingTechnique):
    """Choose how the C library gives memory back to the system.

    Costs: time for page faults with `pinned` and `huge`: a step took 1.2 to 2 times as long where
    it was measured (decisions/002).

    Not for: budgets with room to spare: the default allocator is the fastest for many small tensors.
    """

    kind: str = "pinned"

    order: ClassVar[int] = 70
    exact: ClassVar[bool] = True
    why: ClassVar[str] = "the process stays close to its tensors"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(f"Allocator(kind={self.kind!r}): there are {', '.join(KINDS)}")

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Allocator, ...]:
        return tuple(
            cls(kind) for kind in available_kinds() if kind not in ("default", "pinned" if has_huge_pages() else "huge")
        )

    @property
    def family(self) -> str:
        return text(self)  # the kinds differ too much to count as one family

    def refusal(self, ledger: Ledger) -> str:
        if self.kind in LIBRARIES and not library(self.kind):
            return f"{LIBRARIES[self.kind]} is not installed (Debian: apt-get install lib{self.kind}*)"
        return "" if ledger.has(Trait.OWN_PROCESS) else "memory settings need a process of their own: use a job file"

    @property
    def predictable(self) -> bool:
        """Whether process size can be computed from the tensors, without trying."""
        return self.kind in ("pinned", "huge")

    @property
    def environment(self) -> dict[str, str]:
        if self.kind in LIBRARIES:
            return {"LD_PRELOAD": library(self.kind)}
        if self.kind == "default":
            return {}
        return PINNED | (HUGE if self.kind == "huge" else {})

    def cost(self, ledger: Ledger) -> Ledger:
        rates = ledger.allocation.kinds.get(self.kind, AllocatorRates())
        return replace(ledger, allocation=replace(ledger.allocation, rates=rates))

    def apply(self, run: Run) -> Run:
        return run
