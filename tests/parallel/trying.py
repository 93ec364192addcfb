"""One worker of a group that tries plans: python -m tests.parallel.trying RANK WORLD STORE MODEL [far], with plans as JSON on its input.

The first worker writes a JSON line for every plan: how far its weights are from one process with the whole batch, and bytes in memory and
on the way, of the largest worker, rehearsed and measured.
"""
from __future__ import annotations

import json
import os
import socket
import struct
import sys
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shoestring.core.job import Job
from shoestring.core.link import Link
from shoestring.core.run import brought_home
from shoestring.core.technique import Technique
from shoestring.loop import steps
from shoestring.measure.timeline import peak
from shoestring.parallel.near import joined
from shoestring.planning.plan import techniques_in
from shoestring.planning.rehearse import prepared, rehearse, tracked
from tests.models import job, seeded

STEPS = 5


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(made: Job, techniques: tuple[Technique, ...]) -> tuple[Tensor, list[float]]:
    """Weights and losses after a few steps."""
    run = prepared(made, techniques, seeded(made))
    losses = [float(loss) for loss in steps(run, islice(made.batches(), STEPS))]
    brought_home(run)
    return nn.utils.parameters_to_vector(value.float() for value in run.model.state_dict().values()).detach(), losses


def tried(made: Job, techniques: tuple[Technique, ...], plain: Tensor) -> dict[str, Any]:
    rank, world, near = dist.get_rank(), dist.get_world_size(), "far" not in sys.argv
    grouped = replace(made, link=joined(rank, world, near))
    after, losses = trained(grouped, techniques)
    before = on_the_wire()
    measured = tracked(replace(made, link=joined(rank, world, near)), techniques, seeded(made))
    wire = on_the_wire() - before
    predicted = rehearse(replace(made, link=Link(rank, world, near)), techniques)
    told = grouped.link.objects({
        "apart": float((after - plain).abs().max()), "losses": losses, "peaks": (peak(predicted).bytes, peak(measured).bytes),
        "sent": (predicted.sent, measured.sent), "flops": (predicted.flops.total(), measured.flops.total()),
        "sum": float(after.double().sum()), "wire": wire,
    })
    return {"workers": told}


def on_the_wire() -> int:
    """Bytes that this process has sent to others, by the kernel's own count of its TCP sockets."""
    dist.barrier()
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("Q", told, 120)[0]   # tcpi_bytes_acked: what was sent again counts once
        except OSError:
            continue
    dist.barrier()
    return int(total)


def main() -> None:
    rank, world, store, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    made = job(name, optimizer=sgd)
    plain, _ = trained(made, ())
    for plan in json.load(sys.stdin):
        outcome = tried(made, techniques_in(plan), plain)
        if rank == 0:
            print(json.dumps(outcome), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
