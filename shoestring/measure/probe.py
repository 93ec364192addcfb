"""Measures the machine: which dtypes really work (tried in child processes), speed, disk, the price of fresh memory."""
from __future__ import annotations

import errno
import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from shoestring.core.hardware import Hardware
from shoestring.measure.process import memory_all

TRIALS = {
    "fp32": "a = torch.randn(64, 64); (a @ a).sum().item()",
    "bf16": "a = torch.randn(64, 64).bfloat16().requires_grad_(); (a @ a).sum().backward(); torch.nn.functional.conv2d("
            "torch.randn(2, 16, 8, 8).bfloat16().requires_grad_(), torch.randn(16, 16, 3, 3).bfloat16()).sum().backward()",
    "fp16": "a = torch.randn(64, 64).half().requires_grad_(); (a @ a).sum().backward(); torch.nn.functional.conv2d("
            "torch.randn(2, 16, 8, 8).half().requires_grad_(), torch.randn(16, 16, 3, 3).half()).sum().backward()",
    "int8": "a = torch.randint(-9, 9, (64, 64), dtype=torch.int8); torch._int_mm(a, a).sum().item()",
}
CAPS: tuple[dict[str, str], ...] = ({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"})


def tried(dtype: str, cap: dict[str, str]) -> str:
    """What happened when a child process computed in a dtype: empty if it worked."""
    child = subprocess.run([sys.executable, "-c", f"import torch\n{TRIALS[dtype]}"], env=os.environ | cap, check=False,
                           capture_output=True, text=True, timeout=120)
    if child.returncode == 0:
        return ""
    if child.returncode < 0:
        return f"the process died with {signal.Signals(-child.returncode).name}"
    return child.stderr.strip().splitlines()[-1] if child.stderr.strip() else f"exit code {child.returncode}"


def working_dtypes() -> tuple[dict[str, str], dict[str, str]]:
    """For each dtype what happened, under the first cap on instructions under which most of them work."""
    results: list[tuple[int, int, dict[str, str], dict[str, str]]] = []
    for cap in CAPS:
        outcome = {dtype: tried(dtype, cap) for dtype in TRIALS}
        results.append((sum(map(bool, outcome.values())), len(results), outcome, cap))
        if not any(outcome.values()):
            break
    _, _, outcome, cap = min(results, key=lambda result: result[:2])
    return outcome, cap


def best_time(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def matrix_speed(device: str) -> float:
    """Float32 operations per second of a large matrix product."""
    import torch

    side = 1024 if device == "cpu" else 4096
    left = torch.randn(side, side, device=device)

    def product() -> None:
        (left @ left)[0, 0].item()

    product()
    return 2 * side**3 / best_time(product)


def disk_speed(directory: str, size: int = 1 << 27) -> float:
    """Bytes per second to write a file and read it back, as spilled activations do."""
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


def direct_speed(directory: str, size: int = 1 << 28) -> tuple[float, float]:
    """Bytes per second past the page cache, as streamed weights go, and seconds of a core per byte, with checksums.

    A directory that can't be written to or is full is no reason to fail: then the temporary one is measured. Without direct I/O the speed
    is 0 and the seconds are those of bytes that go through the page cache.
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
    """Bytes per second to write a file block by block and read it again, and seconds of a core per byte."""
    made, path = tempfile.mkstemp(prefix=".shoestring-probe-", dir=directory)
    try:
        file = os.open(path, os.O_RDWR | flags)
    finally:
        os.unlink(path)   # before anything is written: if we are killed, nothing is left behind
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


def fault_price(huge: bool, size: int = 1 << 27) -> float:
    """Seconds per byte to get fresh memory from the kernel, touch it and give it back."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)

    def touch() -> None:
        for start in range(0, size, 4096):
            area[start] = 1

    first, again = best_time(touch, 1), best_time(touch, 2)
    area.close()
    return max(first - again, 0.0) / size


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measured_hardware(dtypes: bool) -> Hardware:
    """This machine, measured now; with the dtypes it takes some ten seconds."""
    import torch

    direct, moving = direct_speed(os.curdir)   # where runs are kept
    hardware = Hardware(
        name=processor(), cores=torch.get_num_threads(), memory=memory_all(), torch=torch.__version__,
        flops=matrix_speed("cpu"), disk=disk_speed(tempfile.gettempdir()), direct=direct, moving=moving, fault=fault_price(huge=False),
        huge_fault=fault_price(huge=True),
    )
    if dtypes:
        outcome, cap = working_dtypes()
        hardware = replace(hardware, dtypes=outcome, environment=cap)
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        hardware = replace(hardware, device="cuda", name=card.name, memory=card.total_memory, flops=matrix_speed("cuda"))
    return hardware


def hardware_file() -> Path:
    import torch

    place = Path(os.path.expanduser("~")) / ".cache" / "shoestring"
    return place / f"hardware-{platform.node()}-{torch.__version__}-{torch.get_num_threads()}.json"   # threads: as its user limits them


def remember(found: dict[str, Any]) -> None:
    """Keep what was measured for the next time."""
    with suppress(OSError):   # a home that can't be written to costs a few seconds each time, no more
        Hardware(**found).save(hardware_file())


def known_hardware(dtypes: bool = False) -> Hardware:
    """This machine, from the file if it was measured before; `dtypes`: also which of them work."""
    found = Hardware.load(hardware_file())
    if found is None or not found.moving or (dtypes and not found.dtypes):
        found = measured_hardware(dtypes)
        remember(asdict(found))
    return found
