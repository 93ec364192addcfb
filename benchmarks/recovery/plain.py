"""The same training by hand, for torchrun: a checkpoint after every step, and going on from it. Run as: plain.py FOLDER PAUSE

Every life of the group writes a line "begun" and a line for each step, with the time, into FOLDER/steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from job import BATCH, WIDTH, model
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

folder, pause = Path(sys.argv[1]), float(sys.argv[2])
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(0)
network = DistributedDataParallel(model())
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
step, saved = 0, folder / "checkpoint"
if saved.exists():
    found = torch.load(saved)
    network.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    step = found["step"]


def tell(word: object) -> None:
    if rank == 0:
        with open(folder / "steps", "a") as file:
            file.write(f"{word} {time.time()}\n")


tell("begun")
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while True:
    time.sleep(pause)
    x = torch.randn(BATCH // world, WIDTH)
    loss = nn.functional.cross_entropy(network(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0:
        torch.save(
            {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            saved.with_suffix(".new"),
        )
        saved.with_suffix(".new").rename(saved)
    tell(step)
