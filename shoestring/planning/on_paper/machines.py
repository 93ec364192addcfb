"""A cluster from a file, for plans on paper: the file of `shoestring plan --hardware`, with what a described model needs besides."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.hardware import MAY_BE_LEFT_OUT, ON_PAPER, cluster, size_of

BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}   # of a number in a matrix product
EXAMPLE = '"peak": {"bf16": 3.12e14}, "efficiency": {"bf16": 0.7}, "attention": 0.33, "processors": 108, "sending": 24'


@dataclass(frozen=True)
class Machines:
    """Many machines of `devices` equal devices. Speeds are in bytes and operations per second, of one device, one direction. (A file says
    the network of a machine: each of its devices has its part.)"""

    memory: float
    bandwidth: float                # of the device's memory
    devices: int                    # in a machine
    link: float                     # inside a machine
    latency: float
    network: float                  # to other machines
    network_latency: float
    base: float                     # bytes that a process takes beside its tensors: the driver's context, buffers for sending
    peak: Mapping[str, float]       # precision -> operations per second that the data sheet states for dense matrix products
    efficiency: Mapping[str, float] = field(default_factory=dict)   # share of that inside a large product: calibrated
    attention: float = 0.33         # share of the 16-bit peak that the fused attention kernel reaches, as published of the kernel
    processors: int = 108           # that a product's tiles are spread over
    sending: int = 24               # of them, what a sum between devices occupies while it runs
    name: str = ""

    def rate(self, precision: str) -> float:
        """Operations per second in the inside of a large product."""
        if precision not in self.peak:
            raise Mistake(f"{self.name or 'the cluster'} has no peak for {precision}, only for {', '.join(self.peak)}: "
                          f"write it into the file, as in {EXAMPLE}")
        if precision not in self.efficiency:
            raise Mistake(f"{self.name or 'the cluster'} does not say what share of its peak it reaches in {precision}: write "
                          f'"efficiency": {{"{precision}": ...}} into the file, or let a published or measured figure tell (calibrate)')
        return self.peak[precision] * self.efficiency[precision]

    def with_efficiency(self, precision: str, share: float) -> Machines:
        return replace(self, efficiency={**self.efficiency, precision: share})


def machines(path: Path) -> Machines:
    cluster(path, 1)   # refuses what is wrong with the file as a cluster, in its own words
    told: dict[str, Any] = {**MAY_BE_LEFT_OUT, **ON_PAPER, **json.loads(path.read_bytes())}
    if not told["peak"]:
        raise Mistake(f"{path} does not say the peak of its devices by precision, which a plan on paper needs: add for example {EXAMPLE}")
    try:
        peak = {str(name): float(value) for name, value in told["peak"].items()}
        efficiency = {str(name): float(value) for name, value in told["efficiency"].items()}
        found = Machines(
            **{name: size_of(told[name]) for name in ("memory", "bandwidth", "link", "base")}, devices=int(told["devices"]),
            latency=float(told["latency"]), network=size_of(told["network"]) / int(told["devices"]),
            network_latency=float(told["network_latency"]), peak=peak, efficiency=efficiency, attention=float(told["attention"]),
            processors=int(told["processors"]), sending=int(told["sending"]), name=str(told["name"]),
        )
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise Mistake(f"{path} does not describe a cluster ({error}): write for example {EXAMPLE}") from error
    positive = {"devices": found.devices, "processors": found.processors, "link": found.link, "network": found.network,
                "bandwidth": found.bandwidth, "memory": found.memory, "attention": found.attention,
                **{f"peak of {name}": value for name, value in peak.items()},
                **{f"efficiency of {name}": value for name, value in efficiency.items()}}
    if wrong := [f"{name} {value:g}" for name, value in positive.items() if not value > 0]:
        raise Mistake(f"{path} says {', '.join(wrong)}: it must be more than nothing")
    shares = {"attention": found.attention, "sending": found.sending / found.processors,
              **{f"efficiency of {name}": value for name, value in efficiency.items()}}
    if wrong := [name for name, value in shares.items() if value > 1]:
        raise Mistake(f"{path} says more than all there is for {', '.join(wrong)}: shares are at most 1, sending at most all processors")
    if unknown := (peak.keys() | efficiency.keys()) - BYTES.keys():
        raise Mistake(f"{path} names the precision {', '.join(sorted(unknown))}; known are {', '.join(BYTES)}")
    return found
