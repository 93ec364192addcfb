"""Groups of real processes that train one job, forked from one that has imported everything."""

from __future__ import annotations

import json
import multiprocessing
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from shoestring.core.files.codec import to_json
from shoestring.core.technique import technique_json
from shoestring.core.workers.sum_costs import Speeds
from shoestring.training.evidence.tasks import Position
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.technique import TrainingTechnique as Technique
from tests.tasks import train_task
from tests.waiting import HUNG

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "shoestring.processes.worker",
        "shoestring.training.evidence.rehearse",
        "shoestring.training.planning.plan",
        "shoestring.training.execution.training",
        "shoestring.training.links.process_link",
        "shoestring.jobfile",
        "torch._dynamo",
    ]
)


class Group:
    """Processes that do one task."""

    def __init__(
        self,
        place: Path,
        world: int,
        job: Path,
        techniques: Sequence[Technique],
        steps: int,
        folder: str = "",
        cadence: Mapping[str, int] | None = None,
        flags: Mapping[str, Any] | None = None,
        weights: str = "",
        speeds: Speeds | None = None,
    ) -> None:
        place.mkdir(exist_ok=True)
        self.place = place
        for old in self.errors():
            old.unlink()
        asked = train_task(job, steps, map(technique_json, techniques), folder, cadence, flags, weights)
        task = replace(asked, position=Position(speeds=speeds))
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [
            CONTEXT.Process(target=member, args=(rank, world, self.store.port, task, str(place)))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def results(self) -> list[dict[str, Any]]:
        """What every worker gave, when all have ended by themselves."""
        running = {process.sentinel for process in self.processes}
        while running and not self.errors() and (ended := wait(running, HUNG)):
            running -= set(ended)
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not self.errors(), self.errors()[0].read_text()
        assert not hanging, f"workers {hanging} did not end"
        return [json.loads((self.place / f"result-{rank}.json").read_text()) for rank in range(len(self.processes))]

    def errors(self) -> list[Path]:
        return sorted(self.place.glob("error-*"))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def member(rank: int, world: int, port: int, task: TrainTask, place: str) -> None:
    import torch
    from torch import distributed

    from shoestring.training.execution.training import train
    from shoestring.training.links.shared_memory_link import join_link

    torch.set_num_threads(1)
    link = None
    if world > 1:
        distributed.init_process_group(
            "gloo",
            store=TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=HUNG / 2),
        )
        link = join_link(rank, world, speeds=task.position.speeds)
    try:
        Path(place, f"result-{rank}.json").write_text(json.dumps(to_json(train(task, lambda event: None, link))))
    except Exception:
        Path(place, f"error-{rank}").write_text(traceback.format_exc())
