"""What the machine has and can do."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.units import parse_bytes


@dataclass(frozen=True)
class Hardware:
    device: str = "cpu"
    name: str = ""                  # of the processor or GPU
    cores: int = 1
    memory: int = 0                 # bytes of the device
    torch: str = ""                 # build
    flops: float = 5e10             # operations per second of a float32 matrix product, all cores
    disk: float = 5e8               # bytes per second, write then read back
    direct: float = 0.0             # the same without the page cache; 0: there is no direct I/O
    moving: float = 0.0             # seconds of a core per byte of that, with its checksum; 0: not measured yet
    fault: float = 6e-11            # seconds per byte of fresh memory in ordinary pages
    huge_fault: float = 2e-11       # the same in huge pages
    bandwidth: float = 5e9          # bytes per second of the device's memory
    base: float = 5e8               # bytes of a process before any tensor, where no real step tells
    links: Mapping[str, Sequence[float]] = field(default_factory=dict)   # workers -> seconds per byte sent, per message, bytes of a process
    described: bool = False         # it is not here: somebody wrote down what it has
    dtypes: Mapping[str, str] = field(default_factory=dict)       # name -> "" if it works, else what happened
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that workers need for kernels to work
    when: float = 0.0               # seconds since 1970 at which the speeds were measured
    tries: int = 0                  # of which the best count
    busy: float = 0.0               # share of the cores that others kept busy in the quietest of them


CLUSTER = """{"name": "8 x A100", "device": "cuda", "memory": "80GiB", "flops": 1.2e14, "bandwidth": "1.5TB", "devices": 8,
 "link": "250GB", "latency": 1e-5, "network": "25GB", "network_latency": 3e-5, "base": "1GiB"}"""


def cluster(path: Path, devices: int) -> Hardware:
    """A described cluster as the hardware of one of `devices` workers.

    A ring passes through every machine once, so its slowest part is what counts: `network` between machines, `link` inside of one.
    """
    try:
        told = {**MAY_BE_LEFT_OUT, **json.loads(path.read_text())}
        known = json.loads(CLUSTER)
        if missing := known.keys() - told.keys():
            raise Mistake(f"{path} does not say {', '.join(sorted(missing))} of the cluster; a whole description is {CLUSTER}")
        if unknown := told.keys() - known.keys() - ON_PAPER.keys():
            raise Mistake(f"{path} describes {', '.join(sorted(unknown))}, which is nothing of a cluster; its keys are those of {CLUSTER}")
        sizes = {name: size_of(told[name]) for name in ("memory", "bandwidth", "link", "network", "base")}
        inside = devices <= int(told["devices"])
        speed = sizes["link"] if inside else min(sizes["link"], sizes["network"])
        latency = float(told["latency"] if inside else told["network_latency"])
        return Hardware(
            device=str(told["device"]), name=str(told["name"]), memory=int(sizes["memory"]), flops=float(told["flops"]),
            bandwidth=sizes["bandwidth"], base=sizes["base"], described=True, cores=1,
            links={str(devices): (1 / speed, 2 * ceil(log2(max(devices, 2))) * latency, 0.0)},
        )
    except Mistake:
        raise
    except FileNotFoundError:
        raise Mistake(f"there is no {path}: describe the cluster in a file such as {CLUSTER}") from None
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise Mistake(f"{path} does not describe a cluster ({type(error).__name__}: {error}): write a file such as {CLUSTER}") from error


MAY_BE_LEFT_OUT: dict[str, Any] = {"name": "", "device": "cuda", "base": "1GiB"}   # base: of a process beside its tensors


def size_of(written: Any) -> float:
    return float(parse_bytes(written)) if isinstance(written, str) else float(written)


ON_PAPER: dict[str, Any] = {"peak": {}, "efficiency": {}, "attention": 0.33, "processors": 108, "sending": 24}   # of planning/on_paper
