"""Other people's data parallel training of the gpt job, one worker of a group: torchrun ... peers.py KIND STEPS.

The first worker prints its seconds a step.

Each trains as its documentation shows, with the same model, the same batches of the same size and torch's fused AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from shoestring.jobs.gpt import Gpt, batches

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, RATE = 320, 8, 5, 128, 8, 1e-3  # those of the job


def fused(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), fused=True)  # type: ignore[arg-type]


def loss_of(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows).flatten(0, 1), targets.flatten())


def plain() -> Callable[[Tensor, Tensor], Tensor]:
    model = Gpt(WIDTH, DEPTH, HEADS, CONTEXT)
    return stepping(model, fused(model.parameters()), lambda loss: loss.backward())


def ddp() -> Callable[[Tensor, Tensor], Tensor]:
    model = nn.parallel.DistributedDataParallel(Gpt(WIDTH, DEPTH, HEADS, CONTEXT))
    return stepping(model, fused(model.parameters()), lambda loss: loss.backward())


def accelerate() -> Callable[[Tensor, Tensor], Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = Gpt(WIDTH, DEPTH, HEADS, CONTEXT)
    model, optimizer = accelerator.prepare(made, fused(made.parameters()))
    return stepping(model, optimizer, accelerator.backward)


def deepspeed() -> Callable[[Tensor, Tensor], Tensor]:
    """ZeRO stage 2, with torch's optimizer."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    made = Gpt(WIDTH, DEPTH, HEADS, CONTEXT)
    engine, *_ = ds.initialize(
        model=made,
        optimizer=fused(made.parameters()),
        config={
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(rows: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(engine, rows, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


Step = Callable[[Tensor, Tensor], Tensor]


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], object]) -> Step:
    def step(rows: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, rows, targets)
        backward(loss)
        optimizer.step()
        return loss

    return step


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    step = {"plain": plain, "ddp": ddp, "accelerate": accelerate, "deepspeed": deepspeed}[kind]()
    own = slice(BATCH * rank // world, BATCH * (rank + 1) // world)
    times, loss = [], torch.zeros(())
    for _, (rows, targets) in zip(range(count), batches(BATCH, CONTEXT, 0), strict=False):
        begun = time.perf_counter()
        loss = step(rows[own], targets[own])
        loss.item()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        print("RESULT " + json.dumps({"seconds": times, "loss": float(loss)}), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
