"""One worker of a turn: worker.py KIND RANK WORLD STORE SETTINGS. The first worker prints what it measured.

Other people's pipelines are used as their documentation shows, with the same model, the same cut, the same batches in as many pieces and
torch's fused AdamW.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from shoestring import Job
from shoestring.jobs.gpt import Gpt, batches
from shoestring.jobs.gpt import job as gpt_job


@dataclass(frozen=True)
class Settings:
    width: int = 320
    depth: int = 8
    context: int = 128
    batch: int = 32
    pieces: int = 8
    steps: int = 4
    warm: int = 1  # of these, that are not counted
    cut: int = 4  # blocks of the first stage
    schedules: tuple[tuple[str, int], ...] = ()  # that are tried one after the other, with how many chunks
    cuts: tuple[int, ...] = ()  # as well
    artificial: bool = False  # equal blocks and nothing else, in place of gpt


Step = Callable[[Tensor, Tensor], None]


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), fused=True)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def made(settings: Settings) -> Gpt:
    return Gpt(settings.width, settings.depth, 5, settings.context)


def plain(settings: Settings, rank: int, pieces: int = 1) -> Step:
    model = made(settings)
    optimizer = fused(model.parameters())

    def step(rows: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        for piece, wanted in zip(rows.chunk(pieces), targets.chunk(pieces), strict=True):
            (loss_of(model(piece), wanted) / pieces).backward()
        optimizer.step()

    return step


def in_pieces(settings: Settings, rank: int) -> Step:
    return plain(settings, rank, settings.pieces)


class First(nn.Module):
    def __init__(self, whole: Gpt, cut: int) -> None:
        super().__init__()
        self.bytes, self.places, self.layers = whole.bytes, whole.places, nn.Sequential(*whole.layers[:cut])

    def forward(self, text: Tensor) -> Tensor:
        return self.layers(self.bytes(text) + self.places(torch.arange(text.shape[1])))  # type: ignore[no-any-return]


class Last(nn.Module):
    def __init__(self, whole: Gpt, cut: int) -> None:
        super().__init__()
        self.layers, self.last, self.head = nn.Sequential(*whole.layers[cut:]), whole.last, whole.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.layers(x)))  # type: ignore[no-any-return]


def torch_pipelining(settings: Settings, rank: int, kind: str) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    whole = made(settings)
    part = First(whole, settings.cut) if rank == 0 else Last(whole, settings.cut)
    optimizer = fused(part.parameters())
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, settings.pieces, loss_fn=loss_of)

    def step(rows: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        schedule.step(rows) if rank == 0 else schedule.step(target=targets)
        optimizer.step()

    return step


def torchgpipe(settings: Settings, rank: int) -> Step:
    """Two threads of one process, which is all that it can do. "cpu" and "cpu:0" are two devices to it, so that it makes two threads."""
    from torchgpipe import GPipe

    whole = made(settings)
    model = GPipe(
        nn.Sequential(First(whole, settings.cut), Last(whole, settings.cut)),
        balance=[1, 1],
        devices=["cpu", "cpu:0"],
        chunks=settings.pieces,
        checkpoint="never",
    )
    optimizer = fused(model.parameters())

    def step(rows: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(rows), targets).backward()
        optimizer.step()

    return step


def timed(settings: Settings, step: Step) -> float:
    times = []
    for rows, targets in islice(batches(settings.batch, settings.context, 0), settings.steps):
        begun = time.perf_counter()
        step(rows, targets)
        times.append(time.perf_counter() - begun)
    return median(times[settings.warm :])


class Equal(nn.Module):
    """Blocks that take as long as each other, and next to nothing else: the first ones too have a gradient to give to what comes before."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = block(x)
        return x


def equal_job(settings: Settings) -> Job:
    x = torch.randn(settings.batch * settings.context, settings.width, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: Equal(settings.width, settings.depth),
        data=lambda: [x],
        loss=lambda output, batch: output.square().mean(),
        optimizer=fused,
        batch=len(x),
        steps=settings.steps,
    )


def ours(
    settings: Settings, rank: int, world: int, job: Job, schedule: str, chunks: int, balance: tuple[int, ...]
) -> dict[str, Any]:
    """Seconds a step, and the share of them in which workers are idle."""
    from shoestring.core.workers.actions import idle_share
    from shoestring.data.feed import Feed
    from shoestring.training.evidence.rehearse import build_run
    from shoestring.training.group_technique import mesh_sizes
    from shoestring.training.links.process_mesh import joined_mesh
    from shoestring.training.links.shared_memory_link import join_link
    from shoestring.training.loop import steps
    from shoestring.training.memory.optimizers.fused import FusedOptimizer
    from shoestring.training.pipeline.pipeline import Pipeline
    from shoestring.training.pipeline.schedule import bubble
    from shoestring.training.pipeline.stages.stages import Stages

    plan = Pipeline(world, settings.pieces, schedule, balance, chunks)
    here = replace(job, mesh=joined_mesh(join_link(rank, world), mesh_sizes((plan,), world), True))
    torch.manual_seed(0)
    run = build_run(here, (plan, FusedOptimizer()), here.model())
    stages = run.state["stages"]
    assert isinstance(stages, Stages)
    times, idle = [], []
    begun = time.perf_counter()
    for _ in steps(run, islice(Feed(here, run.team.assignment), settings.steps)):
        times.append(time.perf_counter() - begun)
        idle.append(idle_share(tuple(here.link.objects(tuple(stages.spans)))))
        begun = time.perf_counter()
    return {
        "seconds": median(times[settings.warm :]),
        "idle": median(idle[settings.warm :]),
        "formula": bubble(schedule, world, settings.pieces, chunks),
        "schedule": schedule,
        "chunks": chunks,
        "balance": balance,
    }


def tries(settings: Settings, rank: int, world: int) -> list[dict[str, Any]]:
    job = (
        equal_job(settings)
        if settings.artificial
        else gpt_job(settings.width, settings.depth, 5, settings.context, settings.batch, settings.steps)
    )
    wanted: list[tuple[str, int, tuple[int, ...]]] = [
        (schedule, chunks, (settings.cut, settings.depth - settings.cut) if chunks == 1 else ())
        for schedule, chunks in settings.schedules
    ]
    wanted += [("1f1b", 1, (cut, settings.depth - cut)) for cut in settings.cuts]
    return [ours(settings, rank, world, job, *one) for one in wanted]


def main() -> None:
    kind, rank, world, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    told = json.loads(sys.argv[5])
    settings = Settings(**told | {"schedules": tuple(map(tuple, told["schedules"])), "cuts": tuple(told["cuts"])})
    torch.set_num_threads(1)
    if kind in ("ours", "torch-gpipe", "torch-1f1b", "apart"):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
        )
    torch.manual_seed(0)
    found: Any
    if kind == "ours":
        found = tries(settings, rank, world)
    elif kind.startswith("torch-"):
        found = timed(settings, torch_pipelining(settings, rank, kind.removeprefix("torch-")))
    elif kind == "apart":  # they begin together, and then do not talk
        step = plain(settings, rank)
        dist.barrier()
        each: list[Any] = [None] * world
        mine = timed(settings, step)
        dist.all_gather_object(each, mine)
        found = max(each)
    else:
        found = timed(
            settings, {"plain": plain, "in pieces": in_pieces, "torchgpipe": torchgpipe}[kind](settings, rank)
        )
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


def as_text(settings: Settings) -> str:
    return json.dumps(asdict(settings))


if __name__ == "__main__":
    main()
