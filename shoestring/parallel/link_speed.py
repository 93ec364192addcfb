"""How fast workers of a group can talk on this machine, and what sending takes of a process."""
from __future__ import annotations

import time
from datetime import timedelta
from statistics import median

import torch
from torch import distributed as dist

from shoestring.core.link import Link
from shoestring.measure.process import status
from shoestring.parallel.shared_memory_link import joined

SIZE = 16 << 20     # bytes that are added up at once
DEADLINE = 60.0     # seconds


def link_speed(rank: int, world: int, same_machine: bool, store: str) -> tuple[float, float, float]:
    """Seconds per byte sent and per message, and bytes of the process; every worker calls it, with a file that they share."""
    kind = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world else "gloo"
    device = torch.device("cuda", rank) if kind == "nccl" else torch.device("cpu")
    large, small = torch.ones(SIZE // 4, device=device), torch.ones(2, device=device)
    dist.init_process_group(kind, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE))
    try:
        dist.all_reduce(small)
        before = status("VmRSS")
        link = joined(rank, world, same_machine)
        slow, quick = (median(seconds(link, tensor) for _ in range(7)) for tensor in (large, small))
        return (slow - quick) / (2 * (world - 1) * SIZE / world), quick, float(max(status("VmRSS") - before, 0))
    finally:
        dist.destroy_process_group()


def seconds(link: Link, tensor: torch.Tensor) -> float:
    """Of adding up a tensor over all workers."""
    dist.barrier()
    begun = time.perf_counter()
    link.sum(tensor).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun
