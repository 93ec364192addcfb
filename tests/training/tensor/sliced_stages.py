"""Workers that compute the gradients of one batch together, each of them the part that it holds."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from shoestring.training.technique import TrainingTechnique as Technique
from tests.training.members import CONTEXT
from tests.waiting import HUNG


def compared(
    place: Path, names: Sequence[str], plans: Sequence[tuple[Technique, ...]], world: int = 2
) -> list[dict[str, Any]]:
    """Of every job, plan and worker: how far gradients are from those of one process, and its bytes, rehearsed and measured."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        CONTEXT.Process(target=worker, args=(rank, world, store.port, str(place), tuple(names), tuple(plans)))
        for rank in range(world)
    ]
    for one in workers:
        one.start()
    for one in workers:
        one.join(HUNG)
        one.kill()
    failed = sorted(place.glob("error-*"))
    assert not failed, "\n".join(one.read_text() for one in failed)
    return [line for rank in range(world) for line in json.loads((place / f"found-{rank}.json").read_text())]


def worker(
    rank: int, world: int, port: int, place: str, names: tuple[str, ...], plans: tuple[tuple[Technique, ...], ...]
) -> None:
    import torch
    from torch import distributed

    from shoestring.core.workers.mesh import imagined_mesh, on_one_axis
    from shoestring.measure.timeline import peak
    from shoestring.training.evidence.rehearse import build_run, rehearse, track
    from shoestring.training.group_technique import mesh_sizes
    from shoestring.training.links.process_mesh import joined_mesh
    from shoestring.training.links.shared_memory_link import join_link
    from tests.models import seeded
    from tests.training.sequence.test_sequence_pipeline import JOBS, one_sample

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=HUNG / 2),
    )
    link = join_link(rank, world)
    found = []
    try:
        for name in names:
            made = {**JOBS, "one sample": one_sample}[name]()
            batch = next(iter(made.data()))
            model = seeded(made).double()
            alone = build_run(replace(made, mesh=on_one_axis()), (), model)
            loss = float(alone.gradients(alone, batch))
            whole = {key: one.grad for key, one in model.named_parameters()}
            for plan in plans:
                sizes = mesh_sizes(plan, world)
                here = replace(made, mesh=joined_mesh(link, sizes))
                model = seeded(made).double()
                run = build_run(here, plan, model)
                off = abs(float(run.gradients(run, batch)) - loss) / loss
                own = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
                norm = sum(float(one.square().sum()) for one in whole.values() if one is not None) ** 0.5
                apart = [float((one - whole[key]).norm()) / norm for key, one in own.items()]
                predicted = rehearse(replace(made, mesh=imagined_mesh(sizes, rank, True)), plan)
                measured = track(here, plan, seeded(made))
                found.append(
                    {
                        "job": name,
                        "plan": str(plan),
                        "rank": rank,
                        "loss": off,
                        "apart": max(apart),
                        "weights": sorted(own),
                        "predicted": peak(predicted).bytes,
                        "measured": peak(measured).bytes,
                        "sent": [predicted.sent, measured.sent],
                    }
                )
        Path(place, f"found-{rank}.json").write_text(json.dumps(found))
    except Exception:
        Path(place, f"error-{rank}").write_text(traceback.format_exc())
