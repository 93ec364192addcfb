"""What the machine has and can do."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.sums import LIBRARY, RING, Rate, Speeds, chosen, seconds, sent
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
    sums: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(default_factory=dict)   # workers -> way to add up -> rates
    speeds: Speeds | None = None    # how fast the workers of the group at hand can talk; None: nobody measured or described it
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

    `link` is what two workers inside a machine have between them; `network` is what a machine has to the others, for all its workers.
    """
    try:
        told = {**MAY_BE_LEFT_OUT, **json.loads(path.read_bytes())}
        known = json.loads(CLUSTER)
        if missing := known.keys() - told.keys():
            raise Mistake(f"{path} does not say {', '.join(sorted(missing))} of the cluster; a whole description is {CLUSTER}")
        if unknown := told.keys() - known.keys() - ON_PAPER.keys():
            raise Mistake(f"{path} describes {', '.join(sorted(unknown))}, which is nothing of a cluster; its keys are those of {CLUSTER}")
        sizes = {name: size_of(told[name]) for name in ("memory", "bandwidth", "link", "network", "base")}
        speeds = Speeds(int(told["devices"]), Rate(1 / sizes["link"], float(told["latency"])),
                        Rate(1 / min(sizes["link"], sizes["network"]), float(told["network_latency"])),
                        only="" if told["device"] == "cpu" else LIBRARY)
        return Hardware(
            device=str(told["device"]), name=str(told["name"]), memory=int(sizes["memory"]), flops=float(told["flops"]),
            bandwidth=sizes["bandwidth"], base=sizes["base"], described=True, cores=1,
            links={str(devices): (*sum_rate(speeds, devices), 0.0)}, speeds=speeds,
        )
    except Mistake:
        raise
    except FileNotFoundError:
        raise Mistake(f"there is no {path}: describe the cluster in a file such as {CLUSTER}") from None
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise Mistake(f"{path} does not describe a cluster ({type(error).__name__}: {error}): write a file such as {CLUSTER}") from error


def sum_rate(speeds: Speeds, world: int) -> tuple[float, float]:
    """What sums take in the ways that are chosen: of a large one, seconds per byte that a worker would send in a ring; of a small one,
    all seconds."""
    machines = speeds.machines(range(max(world, 2)))
    large = chosen(LARGE, machines, speeds)
    longer = seconds(large, 2 * LARGE, machines, speeds) - seconds(large, LARGE, machines, speeds)
    return longer / sent(LIBRARY, 0, machines, LARGE, 1), seconds(chosen(SMALL, machines, speeds), SMALL, machines, speeds)


def measured_group(machine: Hardware, name: str, count: int, ways: Mapping[str, tuple[Rate, ...]], memory: float,
                   busy: bool = False) -> Hardware:
    """The machine with what was measured of so many workers on it, under a name of that. Where others kept it busy, ways can't be
    compared: only the usual one, which is the first, is kept."""
    ways = dict(list(ways.items())[:1]) if busy else ways
    sums = {way: [(rate.per_byte, rate.per_message, rate.most) for rate in rates] for way, rates in ways.items()}
    link = (*sum_rate(Speeds(measured=ways), count), memory)
    return replace(machine, sums={**machine.sums, name: sums}, links={**machine.links, name: link})


def for_group(machine: Hardware, name: str, world: int, here: int) -> Hardware:
    """The machine as one of `world` workers has it, of which `here` share it, by what was measured under a name."""
    ways = {way: tuple(Rate(per_byte, per_message, int(most)) for per_byte, per_message, most in found)
            for way, found in machine.sums[name].items()}
    usual = next(iter(ways))
    rates = ways.get(RING, ways[usual])
    message = Rate(rates[-1].per_byte, rates[0].per_message)   # for two levels, which can't be measured on one machine
    speeds = Speeds(0 if here == world else here, message, message, only=usual if len(ways) == 1 else "", measured=ways)
    return replace(machine, speeds=speeds, links={**machine.links, str(world): machine.links[name]})


SMALL, LARGE = 64, 16 << 20   # bytes of what workers tell each other at every step, and of a bucket of gradients

MAY_BE_LEFT_OUT: dict[str, Any] = {"name": "", "device": "cuda", "base": "1GiB"}   # base: of a process beside its tensors


def size_of(written: Any) -> float:
    return float(parse_bytes(written)) if isinstance(written, str) else float(written)


ON_PAPER: dict[str, Any] = {"peak": {}, "efficiency": {}, "attention": 0.33, "processors": 108, "sending": 24}   # of planning/on_paper
