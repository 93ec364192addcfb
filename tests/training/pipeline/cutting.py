"""Models cut into stages in one process: workers are threads, so that many models are tried in little time. The engine is the real one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Lock

import torch
from torch import Tensor, nn

from shoestring.core.job import Job
from shoestring.core.running.run import Run, plain_run
from shoestring.core.workers.mesh import Mesh
from shoestring.data.feed import Feed
from shoestring.measure.blocks import blocks
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps
from shoestring.training.pipeline.partition.chain import chain_of
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.pipeline.stages.stages import Stages
from shoestring.training.pipeline.stages.walk import Chain
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import seeded
from tests.training.thread_links import in_threads


@dataclass(frozen=True)
class Found:
    """What a step, or several, have left, put together of all workers."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def still(model: nn.Module) -> nn.Module:
    """Without dropout: what is drawn follows from how many draw. Models also keep its rate as a number."""
    if hasattr(model, "config"):
        model.config.layerdrop = 0.0  # type: ignore[union-attr]
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name in ("layerdrop", "drop_prob")):
                setattr(module, name, 0.0)
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model


def looked_at(job: Job) -> Chain:
    model = still(seeded(job)).train()
    return chain_of(plain_run(job, model, blocks(model)), next(iter(Feed(job))))


def uneven(calls: int, stages: int) -> tuple[int, ...]:
    """The first stage has one block, the second what the others leave."""
    each = [1, *[1] * (stages - 2), 0]
    each[-1] = calls - sum(each)
    return tuple(each[:1] + each[:0:-1])


def alone(job: Job, count: int = 1) -> Found:
    """One process with the whole batch: gradients of the last of so many steps."""
    run = build_run(job, (), still(seeded(job)))
    return Found(last_loss(run, job, count), of_gradients(run.model), of_buffers(run.model))


def last_loss(run: Run, job: Job, count: int) -> float:
    """Steps, of which the last moves no weight."""
    *before, last = islice(Feed(job, run.team.assignment), count)
    for _ in steps(run, before):
        pass
    run.optimizer.zero_grad(set_to_none=True)
    return float(run.gradients(run, last))


def of_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.to_dense().clone() for name, one in model.named_parameters() if one.grad is not None}


def of_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_buffers()}


def cut(job: Job, technique: Pipeline, count: int = 1, more: Sequence[Technique] = (), copies: int = 1) -> Found:
    """The same of a group whose workers hold some blocks each, and `copies` of them the same ones."""
    sizes = {"data": copies, "stage": technique.stages, "tensor": 1}
    model, one_at_a_time = still(seeded(job)), Lock()

    def work(mesh: Mesh) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        here = replace(job, mesh=mesh)
        with one_at_a_time:  # the global generators are everybody's here
            run = build_run(here, (technique, *more), copy.deepcopy(model))
        mesh.link.objects("all have it")
        stages = run.state["stages"]
        assert isinstance(stages, Stages)
        loss = last_loss(run, here, count)
        own = {name for name, users in stages.weights.users.items() if mesh.along("stage").rank == users[0]}
        kept = {name for name, users in stages.weights.buffer_users.items() if mesh.along("stage").rank == users[0]}
        return (
            loss,
            {name: value for name, value in of_gradients(run.model).items() if name in own},
            {name: value for name, value in of_buffers(run.model).items() if name in kept},
        )

    told = in_threads(sizes, work)
    assert len({loss for loss, _, _ in told}) == 1, "all tell the same loss"
    return Found(
        told[0][0],
        {name: value for _, some, _ in told for name, value in some.items()},
        {name: value for _, _, some in told for name, value in some.items()},
    )


def apart(found: Found, expected: Found) -> float:
    """How far gradients are apart at most, relative to the size of each; 1 if a buffer is another or the loss is."""
    missing = {
        name for name in expected.gradients if name not in found.gradients and bool(expected.gradients[name].any())
    }
    assert not missing and found.gradients.keys() <= expected.gradients.keys(), missing
    total = sum(float(one.abs().double().square().sum()) for one in expected.gradients.values()) ** 0.5
    far = max(
        float((found.gradients[name] - one).abs().double().norm() / (one.abs().double().norm() + 1e-3 * total))
        for name, one in expected.gradients.items()
        if name in found.gradients
    )
    others = [
        name
        for name, one in expected.buffers.items()
        if not torch.allclose(found.buffers[name].to_dense(), one.to_dense(), rtol=1e-5, atol=1e-7)
    ]
    assert not others, others
    return max(far, abs(found.loss - expected.loss) / (abs(expected.loss) + 1e-12))
