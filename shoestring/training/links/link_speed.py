"""Measure how fast workers of a group communicate on this machine, with every all-reduce algorithm, and what sending
costs a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from shoestring.core.workers.sum_costs import AllReduceTable, Rate, fit_rates
from shoestring.core.workers.sums import LIBRARY, MEMORY, NAIVE, RING, TREE, Machines
from shoestring.measure.process import status
from shoestring.training.links.process_link import ProcessLink
from shoestring.training.links.shared_memory_link import join_link

REPEATS = {1 << 10: 8, 1 << 16: 8, 1 << 20: 2, 16 << 20: 1}  # bytes per all-reduce -> repetitions in a row,
ROUNDS = 11  # in so many rounds
DEADLINE = 60.0  # seconds


def link_speed(rank: int, world: int, same_machine: bool, store: str) -> tuple[dict[str, tuple[Rate, ...]], float]:
    """The rates of every all-reduce algorithm, and bytes that links take of the process. Every worker calls it with the
    same store file."""
    kind = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "gloo"
    device = torch.device("cuda", rank) if kind == "nccl" else torch.device("cpu")
    dist.init_process_group(
        kind, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE)
    )
    try:
        tensors = {size: torch.ones(size // 4, device=device) for size in REPEATS}
        dist.all_reduce(tensors[min(REPEATS)])
        before = status("VmRSS")
        link = join_link(rank, world, same_machine)
        ways = [LIBRARY] if kind == "nccl" else [*[MEMORY] * link.same_machine, LIBRARY, RING, TREE, NAIVE]
        for tensor in tensors.values():
            turn(
                link, tensor, repeats=2
            )  # the usual algorithm: others' temporary memory is a tensor, and counted as one
        memory = float(max(status("VmRSS") - before, 0))
        machines = dict.fromkeys(ways, (world,))
        return rates(time_sums(link, machines, tensors), machines), memory
    finally:
        dist.destroy_process_group()


def rates(spent: Mapping[tuple[str, int], float], machines: Mapping[str, Machines]) -> dict[str, tuple[Rate, ...]]:
    """The rates of each algorithm, from its seconds at several sizes."""
    return {
        way: fit_rates(way, own, [(size, spent[way, size]) for size in sorted(REPEATS)])
        for way, own in machines.items()
    }


def lower_quartile(rounds: list[float]) -> float:
    """The first quartile of the rounds: a busy machine only ever makes rounds slower."""
    return sorted(rounds)[len(rounds) // 4]


def time_sums(
    link: ProcessLink,
    machines: Mapping[str, Machines],
    tensors: Mapping[int, Tensor],
    repeats: Mapping[int, int] = REPEATS,
    count: int = ROUNDS,
    of: Callable[[list[float]], float] = lower_quartile,
) -> dict[tuple[str, int], float]:
    """Seconds of one all-reduce by (algorithm, size). Every round measures each algorithm in turn, so that a slow
    moment of the machine hits all of them. The slowest worker counts, and all workers return the same result."""
    usual = link.sums
    found: dict[tuple[str, int], list[float]] = {(way, size): [] for size in tensors for way in machines}
    try:
        order = list(found)
        for number in range(count + 1):  # the first round warms up
            for way, size in (
                order[number % len(order) :] + order[: number % len(order)]
            ):  # a changing order, so that none always follows the same one
                link.sums = AllReduceTable(machines[way], ((size, way),))
                found[way, size].append(turn(link, tensors[size], repeats[size]))
    finally:
        link.sums = usual
    told = torch.tensor([row[1:] for row in found.values()], dtype=torch.float64)
    each = torch.stack([one.cpu() for one in link.objects(told)]).amax(0)
    return {one: of(row) for one, row in zip(found, each.tolist(), strict=True)}


def turn(link: ProcessLink, tensor: Tensor, repeats: int) -> float:
    """Mean seconds of summing a tensor, over `repeats` times in a row."""
    tensor.fill_(1.0)  # repeated sums must stay finite
    dist.barrier(link.group)
    begun = time.perf_counter()
    for _ in range(repeats):
        link.sum(tensor).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats
