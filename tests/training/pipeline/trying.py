"""One worker of a group that tries plans: python -m tests.training.pipeline.trying RANK WORLD STORE MODEL [far clip
still], plans on its input.

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
from shoestring.core.running.run_weights import bring_home
from shoestring.core.technique import in_order
from shoestring.core.workers.mesh import imagined_mesh, on_one_axis
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.processes.group.worker import leave
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.group_technique import mesh_sizes
from shoestring.training.links.process_mesh import joined_mesh
from shoestring.training.links.shared_memory_link import join_link
from shoestring.training.loop import steps
from shoestring.training.planning.plan import technique_in
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import job, seeded
from tests.training.pipeline.cutting import still
from tests.waiting import HUNG

STEPS = 5
SEEDS = 12
CLIP = 0.05  # less than the norm of any step's gradients


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trained(made: Job, techniques: tuple[Technique, ...]) -> tuple[Tensor, list[float]]:
    """Weights and losses after a few steps."""
    run = build_run(made, techniques, seeded(made))
    losses = [float(loss) for loss in steps(run, islice(Feed(made, run.team.assignment), STEPS))]
    bring_home(run)
    return flat(run.model), losses


def flat(model: nn.Module) -> Tensor:
    """A model's numbers as one vector."""
    return torch.cat([value.detach().float().reshape(-1) for value in model.state_dict().values()])


def tried(made: Job, techniques: tuple[Technique, ...], begun: Tensor, plain: Tensor) -> dict[str, Any]:
    rank, world, near = dist.get_rank(), dist.get_world_size(), "far" not in sys.argv
    sizes = mesh_sizes(techniques, world)
    grouped = replace(made, mesh=joined_mesh(join_link(rank, world, near), sizes, near))
    after, losses = trained(grouped, techniques)
    before = on_the_wire()
    apart = join_link(
        rank, world, near, group=dist.new_group()
    )  # what is still on its way after two steps reaches no other plan
    measured = track(replace(made, mesh=joined_mesh(apart, sizes, near)), techniques, seeded(made))
    wire = on_the_wire() - before
    predicted = rehearse(replace(made, mesh=imagined_mesh(sizes, rank, near)), techniques)
    told = grouped.link.objects(
        {
            "apart": float((after - plain).abs().max()),
            "drift": float((after - plain).norm() / (plain - begun).norm()),
            "losses": losses,
            "peaks": (peak(predicted).bytes, peak(measured).bytes),
            "sent": (predicted.sent, measured.sent),
            "flops": (predicted.flops.total(), measured.flops.total()),
            "sum": float(after.double().sum()),
            "wire": wire,
        }
    )
    return {"workers": told}


def drawn(made: Job, techniques: tuple[Technique, ...]) -> dict[str, Any]:
    """The finished model's loss on the whole batch, without dropout, over seeds: of one process and of the group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "plain": [judged(made, (), 1000 + seed) for seed in range(SEEDS)],
        "group": [
            judged(replace(made, mesh=on_one_axis(join_link(rank, world))), techniques, 2000 + SEEDS * rank + seed)
            for seed in range(SEEDS)
        ],
    }


def judged(made: Job, techniques: tuple[Technique, ...], seed: int) -> float:
    model = seeded(made)
    torch.manual_seed(seed)
    run = build_run(made, techniques, model)
    for _ in steps(run, islice(Feed(made, run.team.assignment), STEPS)):
        pass
    batch = next(iter(made.data()))
    model.eval()
    with torch.no_grad(), run.outside.usable():
        return float(made.loss(made.forward(model, batch), batch))


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
                        total += struct.unpack_from("Q", told, 120)[
                            0
                        ]  # tcpi_bytes_acked: what was sent again counts once
        except OSError:
            continue
    dist.barrier()
    return int(total)


def main() -> None:
    rank, world, store, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=HUNG)
    )
    made = job(name, optimizer=sgd, clip=CLIP if "clip" in sys.argv else 0.0)
    if "still" in sys.argv:
        factory = made.model
        made = replace(made, model=lambda: still(factory()))
    begun, plain = flat(seeded(made)), trained(made, ())[0]
    for plan in json.load(sys.stdin):
        techniques = in_order(technique_in(one["name"], one["knobs"]) for one in plan)
        outcome = drawn(made, techniques) if "seeds" in sys.argv else tried(made, techniques, begun, plain)
        if rank == 0:
            print(json.dumps(outcome), flush=True)
    dist.barrier()
    leave(0)  # as the product's workers do: threads of gloo may abort a process that tidies up


if __name__ == "__main__":
    main()
