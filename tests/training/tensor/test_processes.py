"""TensorParallel by two real processes: what was predicted of it, to the byte; what it draws; and runs that go on with another mesh."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.costs.hardware import Hardware
from shoestring.core.workers.mesh import Mesh, imagined_mesh
from shoestring.jobfile import job_path, load_job
from shoestring.measure.timeline import peak
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.training.members import CONTEXT, Group
from tests.training.tensor.split_models import Pair, apart, made, run_of, split_job, whole_gradients
from tests.waiting import HUNG

TWO, FOUR = {"data": 1, "stage": 1, "tensor": 2}, {"data": 2, "stage": 1, "tensor": 2}
PLANS: tuple[tuple[Technique, ...], ...] = (
    (TensorParallel(2),),
    (TensorParallel(2, sequence=True),),
    (TensorParallel(2), Checkpoint(every=1)),
    (TensorParallel(2), Accumulate(2)),
)
MORE: tuple[tuple[Technique, ...], ...] = (
    (TensorParallel(2, sequence=True), Checkpoint(every=1)),
    (TensorParallel(2), Precision("bf16")),
    (TensorParallel(2, sequence=True), Accumulate(2)),
    (TensorParallel(2), OffloadActivations()),
    (TensorParallel(2), FusedOptimizer()),
)
ON_TWO_AXES: tuple[tuple[Technique, ...], ...] = (
    (TensorParallel(2), DataParallel()),
    (TensorParallel(2), Shard(1)),
    (TensorParallel(2, sequence=True), DataParallel(), Checkpoint(every=1)),
    (TensorParallel(2), CompressGradients("int8")),
)
slow = pytest.mark.slow


def member(
    rank: int, sizes: dict[str, int], place: str, near: bool, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    from torch import distributed

    from shoestring.training.links.process_mesh import joined_mesh
    from shoestring.training.links.shared_memory_link import join_link

    torch.set_num_threads(1)
    world = sizes["data"] * sizes["stage"] * sizes["tensor"]
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=world, timeout=timedelta(seconds=HUNG)
    )
    try:
        mesh = joined_mesh(join_link(rank, world, near, 200.0), sizes, near)
        Path(place, f"result-{rank}").write_text(json.dumps(work(mesh, *args)))
        distributed.barrier()
    except Exception:
        Path(place, f"error-{rank}").write_text(traceback.format_exc())


def in_processes(place: Path, sizes: dict[str, int], near: bool, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What every worker of a mesh of real processes gives."""
    world = sizes["data"] * sizes["stage"] * sizes["tensor"]
    processes = [
        CONTEXT.Process(target=member, args=(rank, sizes, str(place), near, work, args)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HUNG)
        process.kill()
    errors = sorted(place.glob("error-*"))
    assert not errors, errors[0].read_text()
    return [json.loads((place / f"result-{rank}").read_text()) for rank in range(world)]


def compared(mesh: Mesh, name: str, plans: tuple[tuple[Technique, ...], ...]) -> list[dict[str, Any]]:
    """Of every plan: peak of tensors, bytes sent and operations, rehearsed and measured; with clipping and a validation."""
    found = []
    for plan in plans:
        job = split_job(name, clip=0.1, held_out=lambda: [next(iter(split_job(name).data()))])
        measured = track(replace(job, mesh=mesh), plan, made(job))
        imagined = imagined_mesh(mesh.sizes, mesh.link.rank, mesh.link.same_machine)
        predicted = rehearse(replace(job, mesh=imagined), plan)
        found.append(
            {
                "peaks": (peak(predicted).bytes, peak(measured).bytes),
                "sent": (predicted.sent, measured.sent),
                "flops": (predicted.flops.total(), measured.flops.total()),
            }
        )
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "near", "plans"),
    [
        ("gpt", TWO, True, PLANS),
        pytest.param("gpt", TWO, False, PLANS + MORE, marks=slow),
        *(pytest.param(name, TWO, True, PLANS + MORE, marks=slow) for name in ("gpt2", "llama", "gpt2 with dropout")),
        *(
            pytest.param(name, FOUR, near, ON_TWO_AXES, marks=slow)
            for name in ("gpt", "gpt2")
            for near in (True, False)
        ),
    ],
)
def test_memory_bytes_and_operations_are_those_that_were_rehearsed(
    name: str, sizes: dict[str, int], near: bool, plans: tuple[tuple[Technique, ...], ...], tmp_path: Path
) -> None:
    for worker in in_processes(tmp_path, sizes, near, compared, name, plans):
        for plan, found in zip(plans, worker, strict=True):
            for figure in ("peaks", "sent", "flops"):
                predicted, measured = found[figure]
                assert predicted == measured, (plan, figure)
            assert min(found["sent"][1]) > 0


def against_one_process(mesh: Mesh, name: str, sequence: bool) -> tuple[float, float]:
    job = split_job(name)
    model, batch = made(job), next(iter(job.data()))
    plain, run = run_of(job, (), model), run_of(job, (TensorParallel(2, sequence),), model, mesh)
    losses = [float(one.gradients(one, batch)) for one in (plain, run)]
    return apart(whole_gradients(run), whole_gradients(plain)), abs(losses[0] - losses[1])


@pytest.mark.parametrize(
    ("name", "sequence", "near"),
    [
        ("llama", False, True),
        *(
            pytest.param(name, sequence, near, marks=slow)
            for name in ("gpt", "gpt2", "llama")
            for sequence in (False, True)
            for near in (True, False)
        ),
    ],
)
def test_gradients_of_real_processes_are_those_of_one(name: str, sequence: bool, near: bool, tmp_path: Path) -> None:
    for gradients, loss in in_processes(tmp_path, TWO, near, against_one_process, name, sequence):
        assert gradients <= 1e-6 and loss <= 2e-6


def drawn(mesh: Mesh, sequence: bool) -> dict[str, Any]:
    """What dropout left inside and outside of split layers, twice, and weights that all hold, after some steps."""
    job, found = split_job("pairs"), []
    torch.manual_seed(5)  # as fresh_model does: the same along a tensor line
    run = run_of(job, (TensorParallel(2), Checkpoint(every=1)), made(job), mesh)
    torch.manual_seed(5)
    for _ in steps(run, job.data()):
        found.append([[seen.long().tolist() for seen in block.seen] for block in run.model if isinstance(block, Pair)])
    whole = split_job("gpt2 with dropout")
    other = run_of(whole, (TensorParallel(2),), made(whole), mesh)
    torch.manual_seed(5)
    list(steps(other, whole.data()))
    norms = [
        weight.double().sum().item()
        for runs in (run, other)
        for weight in runs.model.parameters()
        if weight not in runs.state["tensor parts"].splits
    ]  # type: ignore[attr-defined]
    return {"seen": found, "norms": norms}


def test_workers_draw_alike_outside_of_split_layers_and_apart_inside(tmp_path: Path) -> None:
    """Also when blocks are computed again; so weights that all hold stay the same bits."""
    one, other = in_processes(tmp_path, TWO, True, drawn, False)
    assert one["norms"] == other["norms"] and len(one["norms"]) > 10
    for step, (here, there) in enumerate(zip(one["seen"], other["seen"], strict=True)):
        for (inside, after), (inside_there, after_there) in zip(here, there, strict=True):
            assert after == after_there and inside != inside_there, step
    masks = [str(inside) for step in one["seen"] for inside, _ in step]
    assert len(set(masks)) == len(masks), "every block and step draws other ones"


def beside_torch(mesh: Mesh) -> float:
    """The same pair of layers split by torch's own parallelize_module: how far its gradients are from ours."""
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    job = split_job("pairs")
    model, batch = made(job), next(iter(job.data()))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours = run_of(job, (TensorParallel(2),), model, mesh)
    loss = ours.gradients(ours, batch)
    theirs = parallelize_module(
        model,
        init_device_mesh("cpu", (2,)),
        {
            f"{block}.{name}": style()
            for block in (0, 1)
            for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
        },
    )
    value = nn.functional.cross_entropy(theirs(batch[0]), batch[1])
    value.backward()
    assert abs(float(value.detach()) - float(loss)) <= 1e-6
    whole = {
        name: weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        for name, weight in theirs.named_parameters()
        if weight.grad is not None
    }
    return apart(whole_gradients(ours), whole)


def test_torch_s_own_way_to_split_layers_gives_the_same_gradients(tmp_path: Path) -> None:
    assert max(in_processes(tmp_path, TWO, True, beside_torch)) <= 1e-6


# Whole runs of the built-in job

GPT = Path(job_path("gpt"))
FLAGS = {"width": 32, "depth": 2, "heads": 2, "context": 16, "batch": 4}


def trained(
    place: Path, world: int, techniques: list[Technique], count: int, folder: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    place.mkdir(exist_ok=True)
    weights = place / f"weights-{count}"
    first = Group(place, world, GPT, techniques, count, folder, {"steps": 2}, FLAGS, str(weights)).results()[0]
    return first, dict(TensorFile(weights).items())


def test_a_run_goes_on_with_another_mesh_and_ends_as_one_process_does(tmp_path: Path) -> None:
    """Two workers that share layers, then one alone, then two again."""
    plain, expected = trained(tmp_path / "plain", 1, [], 6, "")
    folder, line = str(tmp_path / "run"), [TensorParallel(2)]
    (tmp_path / "run").mkdir()
    trained(tmp_path / "group", 2, line, 2, folder)
    trained(tmp_path / "group", 1, [], 4, folder)
    last, found = trained(tmp_path / "group", 2, line, 6, folder)
    assert last["losses"] == pytest.approx(plain["losses"][-2:], rel=1e-5) and len(last["losses"]) == 2
    assert apart(found, expected) <= 1e-3, (
        "a bias of keys has no gradient but what rounding leaves, and AdamW makes steps of that"
    )


@slow
@pytest.mark.parametrize(
    "plan", [[TensorParallel(2)], [TensorParallel(2, sequence=True)], [TensorParallel(2), Shard(1)]], ids=str
)
def test_a_run_that_goes_on_with_the_same_mesh_ends_with_the_same_bits(plan: list[Technique], tmp_path: Path) -> None:
    world, folder = 2 * len(plan), tmp_path / "run"
    folder.mkdir()
    _, expected = trained(tmp_path / "whole", world, plan, 4, "")
    trained(tmp_path / "group", world, plan, 2, str(folder))
    _, found = trained(tmp_path / "group", world, plan, 4, str(folder))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_the_planner_promises_the_bytes_and_the_peak_that_are_measured(tmp_path: Path) -> None:
    plan = (
        Planner(
            replace(load_job(GPT, FLAGS), steps=3),
            Hardware(described=True, memory=1 << 40),
            wanted=(TensorParallel(2),),
            devices=2,
        )
        .outcome(None, (TensorParallel(2),))
        .chosen
    )
    first = Group(tmp_path, 2, GPT, [TensorParallel(2)], 3, flags=FLAGS).results()[0]
    assert (
        first["measured"]["peak_bytes"] == plan.predicted["peak_bytes"]
        and first["measured"]["sent_bytes"] == plan.predicted["sent_bytes"] > 0
    )
