"""A described cluster, for plans on paper: the file of `shoestring plan --hardware`, with the additional fields that
these need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoestring.core.costs.cluster_file import read_cluster
from shoestring.core.errors import Mistake

EXAMPLE = '"peak": {"bf16": 3.12e14}, "efficiency": {"bf16": 0.7}, "attention": 0.33, "processors": 108, "sending": 24'
REACHED = 0.88  # fraction of a data sheet's memory bandwidth that read-only kernels reach: 1.80 of 2.04 TB/s on an A100
# 80 GB, by a timed kernel and by Nsight Compute (forums.developer.nvidia.com/t/339083)

START = (
    3e-6  # seconds of a wave of tiles before its first products: launching the kernel, fetching the first numbers. With
)
# this whole number of microseconds the errors over arXiv 2104.04473's table 1 are least (benchmarks/on_paper)


@dataclass(frozen=True)
class Machines:
    """Many machines with `devices` equal devices each. Speeds are in bytes and operations per second, of one device, in
    one direction. (A file states a machine's network; each of its devices gets its share.)"""

    memory: float
    bandwidth: float  # of the device's memory, as kernels reach it
    devices: int  # in a machine
    link: float  # within a machine
    latency: float
    network: float  # between machines
    network_latency: float
    base: float  # bytes of a process besides its tensors: the driver's context, communication buffers
    peak: Mapping[str, float]  # precision -> operations per second of dense matrix products, by the data sheet
    efficiency: Mapping[str, float] = field(default_factory=dict)  # fraction of that inside a large product: calibrated
    attention: float = (
        0.33  # fraction of the 16-bit peak that the fused attention kernel reaches, as published for the kernel
    )
    processors: int = 108  # multiprocessors that a product's tiles are spread over
    sending: int = 24  # multiprocessors that a running collective occupies
    name: str = ""
    start: float = START

    def rate(self, precision: str) -> float:
        """Operations per second inside a large product."""
        if precision not in self.peak:
            raise Mistake(
                f"{self.name or 'the cluster'} has no peak for {precision}, only for {', '.join(self.peak)}: "
                f"write it into the file, as in {EXAMPLE}"
            )
        if precision not in self.efficiency:
            raise Mistake(
                f"{self.name or 'the cluster'} does not say what share of its peak it reaches in {precision}: write "
                f'"efficiency": {{"{precision}": ...}} into the file, or let a published or measured figure tell (calibrate)'
            )
        return self.peak[precision] * self.efficiency[precision]

    def with_efficiency(self, precision: str, share: float) -> Machines:
        return replace(self, efficiency={**self.efficiency, precision: share})


def machines(path: Path) -> Machines:
    told = read_cluster(path)
    if not told.peak:
        raise Mistake(
            f"{path} does not say the peak of its devices by precision, which a plan on paper needs: add for example {EXAMPLE}"
        )
    return Machines(
        told.memory,
        REACHED * told.bandwidth,
        told.devices,
        told.link,
        told.latency,
        told.network / told.devices,
        told.network_latency,
        told.base,
        told.peak,
        told.efficiency,
        told.attention,
        told.processors,
        told.sending,
        told.name,
    )
