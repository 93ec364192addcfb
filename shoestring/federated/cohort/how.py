"""Which way trains a job's devices: the fastest that agrees with the plain loop, tried on a few real devices."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoestring.core.job import Job, default_forward, default_loss
from shoestring.federated.cohort.agreement import agreement
from shoestring.federated.cohort.dense import dense_layers
from shoestring.federated.cohort.fused import Fused
from shoestring.federated.cohort.grids import grid_forward
from shoestring.federated.cohort.sequential import Sequential, sequential
from shoestring.federated.cohort.stacked import Forward, Stacked
from shoestring.federated.cohort.vmapped import vmapped
from shoestring.federated.cohort.way import Unsuitable, Way
from shoestring.federated.layout import Layout
from shoestring.federated.records import Records

FUSED, STACKED, SEQUENTIAL = "fused", "stacked", "sequential"
WORDS = {FUSED: "steps written by hand for stacked matrix products",
         STACKED: "one forward and backward of stacked weights",
         SEQUENTIAL: "one device after the other"}


@dataclass(frozen=True)
class How:
    kind: str     # "fused", "stacked" or "sequential"
    chunk: int    # devices at once
    why: str      # for people: which way, and why not a faster one


def how_to_work(job: Job, layout: Layout, sample: Sequence[Records]) -> How:
    """The fastest way that is right for these devices; each is tried against the plain loop."""
    plain = sequential(job, layout, job.model().train())
    reasons, devices = [], list(sample[:3])
    for kind in (FUSED, STACKED):
        try:
            said = agreement(way_of_kind(kind, plain), plain, devices)
        except Unsuitable as why:
            reasons.append(f"not {kind}: {why}")
            continue
        if said.reason:
            reasons.append(f"not {kind}: {said.reason}")
            continue
        return How(kind, chunk_of(kind, layout.size), "; ".join([WORDS[kind] + said.note, *reasons]))
    return How(SEQUENTIAL, 1, "; ".join([WORDS[SEQUENTIAL], *reasons]))


def chunk_of(kind: str, size: int) -> int:
    """Devices at once, by the size of a row: measured on an EPYC with 1 MiB of second and 32 MiB of third cache.

    More of them share the cost of calling an operation; fewer stay in the third cache with all that belongs to them.
    """
    most = 32 if kind == FUSED else 16
    return max(min(most, (12 << 20) // (4 * size)), 2)


def way_of(how: How, plain: Sequential) -> Way:
    return way_of_kind(how.kind, plain)


def way_of_kind(kind: str, plain: Sequential) -> Way:
    if kind == FUSED:
        return fused(plain)
    return Stacked(plain, stacked_forward(plain)) if kind == STACKED else plain


def fused(plain: Sequential) -> Fused:
    job = plain.job
    if job.forward is not default_forward or job.loss is not default_loss:
        raise Unsuitable("the job has a forward or a loss of its own")
    return Fused(plain.layout, dense_layers(plain.model, plain.layout))


def stacked_forward(plain: Sequential) -> Forward:
    if any(not entry.trained for entry in plain.layout.entries):
        raise Unsuitable("the model keeps statistics (a batch norm's), which a stacked forward would not bring up to date")
    makers: tuple[Callable[..., Forward], ...] = (grid_forward, vmapped)
    for make in makers[:-1]:
        try:
            return make(plain.job, plain.model)
        except Unsuitable:
            pass
    return makers[-1](plain.job, plain.model)
