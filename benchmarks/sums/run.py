"""Every way to add up between 2, 3 and 4 processes, 1 KB to 64 MB, in one run: is the predicted best the measured best? Writes README.md.

    python benchmarks/sums/run.py

Each group of processes first measures what planning would (training/links/link_speed.py: some sizes of every way) and
predicts all other sizes by the formulas of core/workers/sums.py. Then every way adds up at every size. In a round each has
one turn, so that a slow moment of the machine meets all of them; the order rotates; the slowest worker counts, and of the
rounds the median.

    off    the time of the way that is chosen / that of the best one, both as measured
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed as dist

from shoestring.core.files.codec import from_json, to_json
from shoestring.core.units import bytes_text
from shoestring.core.workers.sum_costs import Rate, Speeds, choose_algorithm, seconds
from shoestring.core.workers.sums import LIBRARY, MEMORY, NAIVE, RING, TREE, TWO_LEVEL, Machines
from shoestring.training.links.link_speed import REPEATS as TIMED
from shoestring.training.links.link_speed import rates, time_sums
from shoestring.training.links.shared_memory_link import join_link

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
SIZES = tuple(1 << power for power in range(10, 27, 2))
REPEATS = {size: max(min((1 << 18) // size, 16), 1) for size in SIZES}  # sums in a row
ROUNDS, SECONDS = (5, 21), 3.0  # at least and at most; as many as take so long
IMAGINED: dict[int, Machines] = {
    2: (1, 1),
    3: (2, 1),
    4: (2, 2),
}  # of these processes, machines that do not share memory
WAYS = (MEMORY, LIBRARY, RING, TREE, NAIVE, TWO_LEVEL)
LIMIT = 1.15
NEAR, FAR = "on one machine", "between machines"


def worker(rank: int, world: int, folder: str) -> None:
    """One process of a group; the first writes what all found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    link = join_link(rank, world)
    machines = {way: IMAGINED[world] if way == TWO_LEVEL else (world,) for way in WAYS if way != TWO_LEVEL or world > 2}
    found: dict[str, dict[int, float]] = {way: {} for way in machines}
    tensors = {size: torch.ones(size // 4) for size in {*SIZES, *TIMED}}
    known = time_sums(link, machines, {size: tensors[size] for size in TIMED})
    speeds = Speeds(measured=rates(known, machines))  # the same for all workers, so they do as many rounds
    for size in SIZES:
        a_round = REPEATS[size] * sum(seconds(way, size, own, speeds) for way, own in machines.items())
        count = min(max(int(SECONDS / a_round), ROUNDS[0]), ROUNDS[1])
        for (way, _), took in time_sums(link, machines, {size: tensors[size]}, REPEATS, count, median).items():
            found[way][size] = took
    if rank == 0:
        Path(folder, "found").write_text(json.dumps({"rates": to_json(speeds.measured), "found": found}))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process that tidies up


def measured(world: int) -> dict[str, Any]:
    """What a group of so many processes found."""
    with TemporaryDirectory() as folder:
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        group = [
            subprocess.Popen([sys.executable, __file__, "worker", str(rank), str(world), folder], env=own)
            for rank in range(world)
        ]
        try:
            for process in group:
                process.wait(170)
        finally:
            for process in group:
                process.kill()
        return dict(json.loads(Path(folder, "found").read_text()))


def main() -> None:
    load, begun = os.getloadavg()[0], time.perf_counter()
    lines: list[str] = []
    offs: dict[str, list[tuple[float, str]]] = {NEAR: [], FAR: []}
    for world, machines in IMAGINED.items():
        found = measured(world)
        times = {way: {int(size): took for size, took in row.items()} for way, row in found["found"].items()}
        each = {way: from_json(tuple[Rate, ...], rate) for way, rate in found["rates"].items()}
        places = {
            NEAR: ((world,), Speeds(measured={way: rate for way, rate in each.items() if way != TWO_LEVEL})),
            FAR: (machines, Speeds(machines[0], measured={way: rate for way, rate in each.items() if way != MEMORY})),
        }
        lines += [f"### {world} processes", "", *table(times, places, offs), "", *fit(times, each, machines), ""]
    lines = [
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread a process; "
        f"{time.perf_counter() - begun:.0f} s in all, load average before the run {load:.1f}. Microseconds of one sum.",
        "",
        *busy(load),
        *lines,
        *verdict(offs),
    ]
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2])
    print("\n".join(lines))


def table(
    times: Mapping[str, Mapping[int, float]],
    places: Mapping[str, tuple[Machines, Speeds]],
    offs: dict[str, list[tuple[float, str]]],
) -> list[str]:
    """Microseconds of every way at every size, and what is chosen; `offs` gets how far that is from the best, by place."""
    lines = [
        f"| bytes | {' | '.join(times)} | {' | '.join(f'chosen {place} | off' for place in places)} |",
        "|---" * (1 + len(times) + 2 * len(places)) + "|",
    ]
    for size in SIZES:
        row = [bytes_text(size), *(f"{1e6 * took[size]:.0f}" for took in times.values())]
        for place, (machines, speeds) in places.items():
            way = choose_algorithm(size, machines, speeds)
            best = min((one for one in times if one in speeds.measured), key=lambda one: times[one][size])
            off = times[way][size] / times[best][size]
            row += [way, "best" if way == best else f"{off:.2f} ({best})"]
            offs[place].append(
                (off, f"{sum(machines)} processes, {bytes_text(size)}: {way} instead of {best}, {off:.2f}")
            )
        lines.append(f"| {' | '.join(row)} |")
    return lines


def fit(
    times: Mapping[str, Mapping[int, float]], each: Mapping[str, tuple[Rate, ...]], machines: Machines
) -> list[str]:
    """How far the formulas are from what was measured, in the median over the sizes."""
    told = []
    for way, row in times.items():
        speeds = Speeds(measured=each)
        own = machines if way == TWO_LEVEL else (sum(machines),)
        off = median(abs(seconds(way, size, own, speeds) / took - 1) for size, took in row.items())
        first, last = each[way][0], each[way][-1]
        told.append(
            f"{way} {first.per_message * 1e6:.0f} us a message, {last.per_byte * 1e9:.2f} ns a byte ({off:.0%} off)"
        )
    return [
        f"Rates that were measured first, of the smallest and the largest, and how far the formula is off in the median of all sizes: "
        f"{'; '.join(told)}."
    ]


def busy(load: float) -> list[str]:
    """A warning where others had more than a quarter of the machine."""
    if load <= (os.cpu_count() or 1) / 4:
        return []
    return [f"**The machine was busy with other work (load average {load:.1f}): these times say little.**", ""]


def verdict(offs: Mapping[str, list[tuple[float, str]]]) -> list[str]:
    lines = []
    for place, found in offs.items():
        over = [text for off, text in found if off > LIMIT]
        lines += [
            f"Workers {place}: in {len(found) - len(over)} of {len(found)} cases the chosen way is the best or within "
            f"{LIMIT - 1:.0%} of it{' (met)' if not over else ' (missed): ' + '; '.join(over)}.",
            "",
        ]
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
