"""The machine's resources and speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoestring.core.costs.cluster_file import read_cluster
from shoestring.core.workers.sum_costs import Rate, Speeds, choose_algorithm, seconds
from shoestring.core.workers.sums import LIBRARY, RING, sent_bytes


@dataclass(frozen=True)
class Hardware:
    device: str = "cpu"
    name: str = ""  # of the processor or GPU
    cores: int = 1
    memory: int = 0  # bytes of the device
    torch: str = ""  # build
    flops: float = 5e10  # operations per second of a float32 matrix product, all cores
    disk: float = 5e8  # bytes per second, write then read back; 0: not described
    direct: float = 0.0  # the same without the page cache; 0: direct I/O is unavailable
    moving: float = 0.0  # core seconds per byte of that, with its checksum; 0: not measured yet
    fault: float = 6e-11  # seconds per byte of fresh memory in ordinary pages
    huge_fault: float = 2e-11  # the same in huge pages
    bandwidth: float = 5e9  # bytes per second of the device's memory
    base: float = 5e8  # bytes of a process before any tensor, if no real step tells
    links: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # workers -> seconds per byte sent, seconds per message, bytes of a process
    sums: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] = field(
        default_factory=dict
    )  # workers -> all-reduce algorithm -> rates
    speeds: Speeds | None = None  # communication speeds of the present group; None: neither measured nor described
    described: bool = False  # whether it comes from a file instead of this machine
    dtypes: Mapping[str, str] = field(default_factory=dict)  # dtype -> "" if its products work, else what happened
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that workers need for kernels to work
    when: float = 0.0  # when speeds were measured, in seconds since 1970
    tries: int = 0  # number of measurements, of which the best count
    busy: float = 0.0  # fraction of the cores that other processes used during the quietest one


def cluster(path: Path, devices: int) -> Hardware:
    """A described cluster as the hardware of one of `devices` workers."""
    told = read_cluster(path)
    speeds = Speeds(
        told.devices,
        Rate(1 / told.link, told.latency),
        Rate(1 / min(told.link, told.network), told.network_latency),
        only="" if told.device == "cpu" else LIBRARY,
    )
    return Hardware(
        device=told.device,
        name=told.name,
        memory=int(told.memory),
        flops=told.flops,
        bandwidth=told.bandwidth,
        disk=told.disk,
        base=told.base,
        described=True,
        cores=1,
        links={str(devices): (*sum_rate(speeds, devices), 0.0)},
        speeds=speeds,
    )


def sum_rate(speeds: Speeds, world: int) -> tuple[float, float]:
    """Cost of all-reduce with the chosen algorithms: for a large one, seconds per byte that a ring would send; for a
    small one, all seconds."""
    machines = speeds.machines(range(max(world, 2)))
    large = choose_algorithm(LARGE, machines, speeds)
    longer = seconds(large, 2 * LARGE, machines, speeds) - seconds(large, LARGE, machines, speeds)
    return longer / sent_bytes(LIBRARY, 0, machines, LARGE, 1), seconds(
        choose_algorithm(SMALL, machines, speeds), SMALL, machines, speeds
    )


def measured_group(
    machine: Hardware, name: str, count: int, ways: Mapping[str, tuple[Rate, ...]], memory: float, busy: bool = False
) -> Hardware:
    """The machine with measurements for `count` workers, stored under `name`. If other processes kept it busy,
    algorithms can't be compared, so only the usual one, which is the first, is kept."""
    ways = dict(list(ways.items())[:1]) if busy else ways
    sums = {way: [(rate.per_byte, rate.per_message, rate.most) for rate in rates] for way, rates in ways.items()}
    link = (*sum_rate(Speeds(measured=ways), count), memory)
    return replace(machine, sums={**machine.sums, name: sums}, links={**machine.links, name: link})


def for_group(machine: Hardware, name: str, world: int, here: int) -> Hardware:
    """The machine as one of `world` workers has it, of which `here` share it, from measurements stored under `name`."""
    ways = {
        way: tuple(Rate(per_byte, per_message, int(most)) for per_byte, per_message, most in found)
        for way, found in machine.sums[name].items()
    }
    usual = next(iter(ways))
    rates = ways.get(RING, ways[usual])
    message = Rate(rates[-1].per_byte, rates[0].per_message)  # for two-level, which can't be measured on one machine
    speeds = Speeds(0 if here == world else here, message, message, only=usual if len(ways) == 1 else "", measured=ways)
    return replace(machine, speeds=speeds, links={**machine.links, str(world): machine.links[name]})


SMALL, LARGE = 64, 16 << 20  # bytes of the agreement after every step, and of a bucket of gradients
