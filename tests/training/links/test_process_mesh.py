"""Four real processes on two axes: each sums, gathers and sends along its own lines, and counts bytes by axis."""

from __future__ import annotations

import json
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import imagined_mesh, on_one_axis
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import job
from tests.training.members import CONTEXT
from tests.waiting import HUNG

SIZES = {"data": 2, "stage": 2}


def worker(rank: int, store: str, place: str, same_machine: bool) -> None:
    import torch
    from torch import distributed

    from shoestring.training.links.process_mesh import joined_mesh
    from shoestring.training.links.shared_memory_link import join_link

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timedelta(seconds=HUNG)
    )
    try:
        link = join_link(rank, 4, same_machine, HUNG)
        mesh = joined_mesh(link, SIZES, same_machine)
        found: dict[str, Any] = {"place": mesh.coordinates(rank)}
        for axis in SIZES:
            along = mesh.along(axis)
            before = along.sent
            total = torch.full((6,), float(10**rank))
            along.sum(total).wait()
            whole = torch.empty(2)
            along.gather(torch.tensor([float(rank)]), whole).wait()
            found[axis] = {
                "sum": total.tolist(),
                "gathered": whole.tolist(),
                "objects": along.objects(rank),
                "sent": along.sent - before,
            }
            heard = torch.zeros(1)
            if along.rank == 0:
                along.send(torch.tensor([float(rank)]), 1)
            else:
                found[axis]["from"] = along.receive(heard)
                found[axis]["heard"] = heard.item()
        everybody = torch.tensor([float(10**rank)])
        mesh.link.sum(everybody).wait()
        found |= {"all": everybody.item(), "sent": mesh.bytes_sent}
        Path(place, f"result-{rank}").write_text(json.dumps(found))
        distributed.barrier()
    except Exception:
        Path(place, f"error-{rank}").write_text(traceback.format_exc())


@pytest.mark.parametrize("same_machine", [True, False])
def test_sums_along_each_axis_are_those_of_its_line(same_machine: bool, tmp_path: Path) -> None:
    processes = [
        CONTEXT.Process(target=worker, args=(rank, f"{tmp_path}/store", str(tmp_path), same_machine))
        for rank in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HUNG)
        process.kill()
    errors = sorted(tmp_path.glob("error-*"))
    assert not errors, errors[0].read_text()
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(4)]
    for rank, found in enumerate(results):
        assert found["place"] == {"data": rank // 2, "stage": rank % 2}
        lines = {"data": [rank % 2, rank % 2 + 2], "stage": [rank // 2 * 2, rank // 2 * 2 + 1]}
        for axis, line in lines.items():
            along = found[axis]
            assert along["sum"] == [float(sum(10**other for other in line))] * 6
            assert along["gathered"] == line == along["objects"]
            assert along["sent"] == 2 * 24 // 2 + 4, "of a sum of 24 bytes and a gathering of 4, between two"
            if rank == line[1]:
                assert along["from"] == 0 and along["heard"] == line[0], "ranks are those on the line"
        assert found["all"] == 1111.0
        sends = sum(rank == line[0] for line in lines.values())
        assert found["sent"] == 2 * 28 + 4 * sends + 6, "all axes, and the sum of 4 bytes over all four"


@pytest.mark.parametrize(
    "technique",
    [
        DataParallel(),
        Shard(1),
        Shard(3),
        CompressGradients(),
        CompressGradients("topk"),
        LocalSteps(h=1),
        Asynchronous(),
        DropStragglers(),
    ],
    ids=str,
)
def test_what_unites_workers_speaks_along_its_axis_only(technique: Technique) -> None:
    """Beside another axis it sends what it sends without it, and the data are divided as often."""
    alone = rehearse(replace(job("chain"), mesh=on_one_axis(Link(1, 3))), (technique,))
    mesh = imagined_mesh({"data": 3, "stage": 2}, rank=3)
    beside = rehearse(replace(job("chain"), mesh=mesh), (technique,))
    assert beside.sent == alone.sent and sum(alone.sent) > 0
    assert mesh.along("data").sent == mesh.bytes_sent and mesh.along("stage").sent == mesh.link.sent == 0
