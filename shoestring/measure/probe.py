"""Measure the machine: its speed, its disk, and the cost of fresh memory.

A busy machine is slower by factors, and never faster than it really is. So everything is measured in several rounds and
the best counts; how busy the machine was is kept beside it, and kept figures are compared with one cheap measurement
before they are used again.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from shoestring.core.costs.hardware import Hardware
from shoestring.core.workers.sums import WAYS
from shoestring.measure.cache import cache_folder, read_cached, write_cached
from shoestring.measure.instructions import cap_this_process, doubtful, working_dtypes
from shoestring.measure.process import memory_all

ROUNDS = 3  # rounds of measurements, some time apart,
MORE_ROUNDS = 6  # or so many while the machine is never quiet
PAUSE = 0.3  # seconds between two rounds
QUIET = 0.2  # fraction of the cores that other processes may use on a quiet machine
FASTER = 1.25  # if it is faster than measured by this factor, the measurement met a bad moment
SLOWER = 2.0  # if it is slower than measured by this factor while quiet, the machine has changed
SOON = 60.0  # seconds: a measurement on a busy machine is not repeated sooner


def best_time(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def matrix_speed(device: str, repeats: int = 5) -> float:
    """Float32 operations per second of a large matrix product."""
    import torch

    side = 1024 if device == "cpu" else 4096
    left = torch.randn(side, side, device=device)

    def product() -> None:
        (left @ left)[0, 0].item()

    product()
    return 2 * side**3 / best_time(product, repeats)


def disk_speed(directory: str, size: int = 1 << 27) -> float:
    """Bytes per second to write a file and read it back, as offloaded activations do."""
    block = os.urandom(1 << 22)
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        file.seek(0)
        while file.read(len(block)):
            pass
        return 2 * size / (time.perf_counter() - start)


def direct_speed(directory: str, size: int = 1 << 27) -> tuple[float, float]:
    """Bytes per second without the page cache, as for streamed weights, and core seconds per byte, with checksums.

    If a directory is full or not writable, the temporary directory is measured instead. Without direct I/O the speed is
    0, and the seconds are those of bytes that go through the page cache.
    """
    from xxhash import xxh3_64

    block = mmap.mmap(-1, min(size, 1 << 24))
    checking = best_time(lambda: xxh3_64(block).digest()) / len(block)
    for place, direct in product((directory, tempfile.gettempdir()), (getattr(os, "O_DIRECT", 0), 0)):
        with suppress(OSError):
            speed, spent = there_and_back(place, direct, block, size)
            return speed if direct else 0.0, spent + checking
    return 0.0, checking


def there_and_back(directory: str, flags: int, block: mmap.mmap, size: int) -> tuple[float, float]:
    """Bytes per second to write a file block by block and read it again, and core seconds per byte."""
    made, path = tempfile.mkstemp(prefix=".shoestring-probe-", dir=directory)
    try:
        file = os.open(path, os.O_RDWR | flags)
    finally:
        os.unlink(path)  # before anything is written, so that nothing is left if the process is killed
        os.close(made)
    try:

        def work() -> None:
            for start in range(0, size, len(block)):
                if os.pwrite(file, block, start) < len(block):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for start in range(0, size, len(block)):
                os.preadv(file, [block], start)

        work()
        begun = time.process_time()
        speed = 2 * size / best_time(work, 2)
        return speed, (time.process_time() - begun) / (4 * size)
    finally:
        os.close(file)


def touching(huge: bool, size: int = 1 << 26) -> tuple[float, float]:
    """Seconds to touch fresh memory for the first time, and again."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)

    def touch() -> None:
        for start in range(0, size, 4096):
            area[start] = 1

    first, again = best_time(touch, 1), best_time(touch, 2)
    area.close()
    return first / size, again / size


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True)
class ProbeRound:
    """One measurement of everything, and how busy the machine was meanwhile."""

    busy: float
    flops: float
    disk: float
    direct: float
    moving: float
    small: tuple[float, float]  # seconds per byte to touch fresh memory in small pages, and to touch it again
    huge: tuple[float, float]  # the same in huge pages


def one_round(device: str) -> ProbeRound:
    begun = core_seconds()
    direct, moving = direct_speed(os.curdir)  # where runs are stored
    figures = (
        matrix_speed(device),
        disk_speed(tempfile.gettempdir()),
        direct,
        moving,
        touching(huge=False),
        touching(huge=True),
    )
    return ProbeRound(busy_share(begun, core_seconds()), *figures)


def rounds(device: str, measure: Callable[[str], ProbeRound] = one_round, pause: float = PAUSE) -> list[ProbeRound]:
    """Several rounds, more of them on a busy machine, to meet a quiet moment."""
    found = [measure(device)]
    while len(found) < ROUNDS or (len(found) < MORE_ROUNDS and min(one.busy for one in found) > QUIET):
        time.sleep(pause)
        found.append(measure(device))
    return found


def best_of(found: Sequence[ProbeRound], now: float) -> Hardware:
    """The figures of the quietest moments: other processes can only make the machine slower."""
    busy = min(one.busy for one in found)
    fault, huge = (
        max(min(first for first, _ in times) - min(again for _, again in times), 0.0)
        for times in zip(*((one.small, one.huge) for one in found), strict=True)
    )
    if busy > QUIET:  # huge pages need fewer faults, so if they look slower, the kernel was busy finding room
        huge = min(huge, fault)
    return Hardware(
        flops=max(one.flops for one in found),
        disk=max(one.disk for one in found),
        direct=max(one.direct for one in found),
        moving=min(one.moving for one in found),
        fault=fault,
        huge_fault=huge,
        when=now,
        tries=len(found),
        busy=busy,
    )


def core_seconds() -> tuple[float, float]:
    """Core seconds used by other processes since boot, and all core seconds available, on the cores that we may use."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0.0, 0.0
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = [tuple(map(int, words[1:9])) for words in lines if words and words[0] in allowed]
    spent = os.times()
    idle, every = (
        sum(part) / os.sysconf("SC_CLK_TCK") for part in ((one[3] + one[4] for one in ticks), map(sum, ticks))
    )
    return every - idle - sum(spent[:4]), every


def busy_share(begun: tuple[float, float], ended: tuple[float, float]) -> float:
    """The fraction of the cores that other processes used between two readings; 0 if it is unknown."""
    others, every = ended[0] - begun[0], ended[1] - begun[1]
    return min(max(others / every, 0.0), 1.0) if every > 0 else 0.0


def busy_now(seconds: float = 0.2) -> bool:
    """Whether other processes keep the machine busy, by a short look during which this process sleeps."""
    begun = core_seconds()
    time.sleep(seconds)
    return busy_share(begun, core_seconds()) > QUIET


def measure_hardware(dtypes: bool) -> Hardware:
    """This machine, measured now: takes some seconds; with dtypes, some more."""
    cap_this_process()  # before the first matrix product
    import torch

    device = device_here()
    found = replace(
        best_of(rounds(device), time.time()),
        device=device,
        name=processor(),
        cores=torch.get_num_threads(),
        memory=memory_all(),
        torch=torch.__version__,
    )
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found = replace(found, name=card.name, memory=card.total_memory)
    return with_dtypes(found) if dtypes else found


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def with_dtypes(hardware: Hardware) -> Hardware:
    outcome, needed = working_dtypes()
    return replace(hardware, dtypes=outcome, environment=needed)


def hardware_file() -> Path:
    import torch

    threads = torch.get_num_threads()  # the user may have limited them
    return cache_folder() / f"hardware-{platform.node()}-{torch.__version__}-{threads}.json"


def cached_hardware() -> Hardware | None:
    """The earlier measurement; None if there is none, it was made in another way, or for another device."""
    found = read_cached(hardware_file(), Hardware)
    return found if found is not None and is_measured(found) and found.device == device_here() else None


def is_measured(found: Hardware) -> bool:
    """Whether kept figures can be those of a measurement."""
    above = (found.tries, found.cores, found.flops, found.disk, found.bandwidth)
    not_below = (
        found.memory,
        found.direct,
        found.moving,
        found.fault,
        found.huge_fault,
        found.base,
        found.busy,
        found.when,
    )
    ways = [rates for one in found.sums.values() for rates in one.values()]
    return (
        min(above) > 0
        and min(not_below) >= 0
        and found.sums.keys() <= found.links.keys()
        and all(found.sums.values())
        and all(ways)
        and all(way in WAYS for one in found.sums.values() for way in one)
        and all(len(numbers) == 3 and min(numbers) >= 0 for numbers in found.links.values())
        and all(map(is_rate, (rate for one in ways for rate in one)))
    )


def is_rate(numbers: Sequence[float]) -> bool:
    """Whether numbers can be a fitted line: seconds per byte, per message, and bytes to which it goes. Where large sums
    are slower per byte than small ones, the line meets 0 bytes below 0 seconds, but no sum takes less than none."""
    if len(numbers) != 3:
        return False
    per_byte, per_message, most = numbers
    return per_byte >= 0 and most >= 0 and per_message + most * per_byte >= 0


def remember(found: Hardware) -> None:
    """Keep a measurement for the next time. Which dtypes work is kept elsewhere, because it depends on other things."""
    write_cached(hardware_file(), replace(found, dtypes={}, environment={}))


def combine_measurements(kept: Hardware | None, new: Hardware) -> Hardware:
    """The figures to use after measuring again: those of the quieter moment, with anything better from the busier
    one."""
    if kept is None or new.busy <= max(kept.busy, QUIET):
        return new
    return replace(
        new,
        flops=max(kept.flops, new.flops),
        disk=max(kept.disk, new.disk),
        direct=max(kept.direct, new.direct),
        moving=min(kept.moving, new.moving),
        fault=min(kept.fault, new.fault),
        huge_fault=min(kept.huge_fault, new.huge_fault),
        links=kept.links,
        sums=kept.sums,
        when=kept.when,
        tries=kept.tries + new.tries,
        busy=kept.busy,
    )


def doubt(kept: Hardware, flops: float, busy: float, now: float) -> str:
    """Why a kept measurement is no longer believed, given the machine's present speed and load; empty if it is."""
    if flops > FASTER * kept.flops:
        return f"products of matrices are {flops / kept.flops:.1f} times as fast as when it was measured"
    if busy <= QUIET and flops * SLOWER < kept.flops:
        return f"products of matrices are {kept.flops / flops:.1f} times as slow as when it was measured"
    if kept.busy > QUIET and busy < kept.busy / 2 and not 0 <= now - kept.when < SOON:
        return f"others had {kept.busy:.0%} of the cores when it was measured, and have {busy:.0%} now"
    return ""


def glance(device: str) -> tuple[float, float]:
    """A cheap measurement: operations per second now, and the fraction of the cores that other processes use."""
    begun = core_seconds()
    flops = matrix_speed(device, repeats=3)
    time.sleep(0.05)  # the kernel counts in hundredths of a second
    return flops, busy_share(begun, core_seconds())


BELIEVED: set[Path] = set()  # files that this process has checked against the machine


def known_hardware(dtypes: bool = False) -> Hardware:
    """This machine, from the file if a cheap measurement agrees, else measured; `dtypes`: also which of them work."""
    cap_this_process()
    path, found = hardware_file(), cached_hardware()
    if found is None or (path not in BELIEVED and doubt(found, *glance(found.device), time.time())):
        found = combine_measurements(found, measure_hardware(dtypes=False))
        remember(found)
    BELIEVED.add(path)
    return with_dtypes(found) if dtypes or doubtful() else found
