"""Applying a technique makes another run. That which it was given, its job and its links stay as they were, to the last weight,
group, buffer and hook, but for what the technique says that it owns (`TrainingTechnique.owns`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.running.run import BatchCuts, HeldWeights, OutsideSteps, Run, RunSettings, RunTeam, plain_run
from shoestring.core.workers.mesh import imagined_mesh
from shoestring.measure.blocks import blocks
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.group_technique import mesh_sizes
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.sequence.sequence_pipeline import SequencePipeline
from shoestring.training.technique import Owned
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.models import job, seeded

REQUIRED: dict[type[Technique], dict[str, Any]] = {Accumulate: {"pieces": 2}}  # knobs without a default
MORE = (
    Asynchronous("hogwild"),
    CompressGradients("topk"),
    CompressGradients("powersgd"),
    LocalSteps(outer=0.7),
    Shard(1),
    Shard(3),
)


GROUPS = (BatchCuts, OutsideSteps, RunTeam, HeldWeights, RunSettings)


def snapshot(value: Any) -> dict[str, Any]:
    """The fields of a value and of the groups in it, and what is in those that are mappings."""
    found = {field.name: value.__dict__[field.name] for field in fields(value)}
    for name, group in list(found.items()):
        if isinstance(group, GROUPS):
            found |= {f"{name}.{inner}": one for inner, one in snapshot(group).items()}
    return found | {f"in {name}": dict(one) for name, one in found.items() if isinstance(one, Mapping)}


def tensor(one: Tensor) -> dict[str, Any]:
    """Where its numbers are, how they lie there, which they are, and what hangs on them."""
    storage = one.untyped_storage()
    numbers = one.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if storage.nbytes() else None
    return {
        "place": (one.data_ptr(), storage.data_ptr(), storage.nbytes(), one.storage_offset(), one.stride()),
        "kind": (tuple(one.shape), one.dtype, one.device),
        "numbers": numbers,
        "trained": one.requires_grad,
        "gradient": one.grad is None,
        "hooks": (plain(one._backward_hooks), plain(getattr(one, "_post_accumulate_grad_hooks", None))),
    }


def plain(value: Any) -> Any:
    """A value that compares by what it holds; what is not plain data, by identity."""
    if isinstance(value, Mapping):
        return [(plain(key), plain(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float, str, type(None))) else ("object", id(value))


Content = tuple[
    Owned | None, str, Any
]  # what a technique must own to change it (None: no technique may), its name, its value


def contents(run: Run) -> Iterator[Content]:
    """All that is in a run's model and optimizer."""
    for name, module in run.model.named_modules():
        yield None, f"module {name}", plain(vars(module))
    for name, weight in run.model.named_parameters():
        of_weight = {"place": Owned.WEIGHTS, "kind": Owned.WEIGHTS, "numbers": Owned.WEIGHTS, "trained": Owned.TRAINED}
        for part, value in tensor(weight).items():
            yield of_weight.get(part), f"{part} of {name}", value
    for name, buffer in run.model.named_buffers():
        yield None, f"buffer {name}", tensor(buffer)
    for number, group in enumerate(run.optimizer.param_groups):
        yield Owned.GROUPS, f"group {number}", plain(group)
    yield Owned.STATE, "optimizer's state", plain(run.optimizer.state)
    kept = {key: value for key, value in vars(run.optimizer).items() if key not in ("param_groups", "state")}
    yield None, "optimizer", plain(kept)


def changed(before: Sequence[Content], after: Sequence[Content]) -> dict[Owned | None, list[str]]:
    """The names of what is otherwise, by what a technique must own for that."""
    found: dict[Owned | None, list[str]] = {}
    assert [name for _, name, _ in before] == [name for _, name, _ in after]
    for (owned, name, one), (_, _, other) in zip(before, after, strict=True):
        if one != other:
            found.setdefault(owned, []).append(name)
    return found


OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adagrad)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("technique", [*(kind(**REQUIRED.get(kind, {})) for kind in CATALOGUE), *MORE], ids=str)
def test_apply_leaves_what_it_was_given_alone(technique: Technique, rank: int, tmp_path: Path) -> None:
    name = "llama" if isinstance(technique, (TensorParallel, SequencePipeline)) else "chain"
    all_found: dict[Owned | None, list[str]] = {}
    for optimizer in OPTIMIZERS:  # one whose state comes with the first step, and one that has it at once
        made = replace(job(name, optimizer=optimizer), mesh=imagined_mesh(mesh_sizes((technique,), 6), rank))
        model, folder = seeded(made), tmp_path / optimizer.__name__
        folder.mkdir()
        plain = plain_run(made, model, blocks(model))
        settings = replace(plain.settings, folder=folder)
        run = replace(plain, settings=settings, example=lambda made=made: next(iter(made.data())))
        before = snapshot(run), snapshot(made), dict(vars(run.team.link)), dict(vars(run.team.assignment))
        inside = list(contents(run))
        applied = technique.apply(run)
        assert (snapshot(run), snapshot(made), vars(run.team.link), vars(run.team.assignment)) == before
        assert run.team.link is made.link and applied.team.link is run.team.link
        all_found |= changed(inside, list(contents(run)))
    assert set(all_found) == technique.owns, all_found


def test_all_that_is_changed_in_place_is_found() -> None:
    def write(weight: Tensor) -> None:
        weight.data[0] += 1

    changes: dict[str, tuple[Owned | None, Callable[[Run, nn.Parameter], object]]] = {
        "numbers": (Owned.WEIGHTS, lambda run, weight: write(weight)),
        "place": (Owned.WEIGHTS, lambda run, weight: setattr(weight, "data", weight.data.clone())),
        "type": (Owned.WEIGHTS, lambda run, weight: setattr(weight, "data", weight.data.double())),
        "frozen": (Owned.TRAINED, lambda run, weight: weight.requires_grad_(False)),
        "gradient": (None, lambda run, weight: setattr(weight, "grad", torch.ones_like(weight))),
        "hook": (None, lambda run, weight: weight.register_hook(lambda gradient: gradient)),
        "arrival": (None, lambda run, weight: weight.register_post_accumulate_grad_hook(lambda weight: None)),
        "mode": (None, lambda run, weight: run.model.eval()),
        "module's hook": (None, lambda run, weight: run.model.register_forward_hook(lambda *given: None)),
        "forward": (None, lambda run, weight: setattr(run.model, "forward", run.model.forward)),
        "buffer": (None, lambda run, weight: dict(run.model.named_buffers())["running_mean"].add_(1)),
        "another buffer": (None, lambda run, weight: run.model.register_buffer("running_mean", torch.zeros(3))),
        "rate": (Owned.GROUPS, lambda run, weight: run.optimizer.param_groups[0].update(lr=1.0)),
        "members": (Owned.GROUPS, lambda run, weight: run.optimizer.param_groups[0]["params"].pop()),
        "state": (Owned.STATE, lambda run, weight: run.optimizer.state[weight].update(step=1)),
        "step's hook": (None, lambda run, weight: run.optimizer.register_step_pre_hook(lambda *given: None)),
    }
    for name, (owned, change) in changes.items():
        made = replace(job("chain"), model=lambda: nn.BatchNorm1d(3))
        model = seeded(made)
        run = plain_run(made, model, {})
        before = list(contents(run))
        assert not changed(before, list(contents(run)))
        change(run, next(iter(model.parameters())))
        assert set(changed(before, list(contents(run)))) == {owned}, name


def test_defaults_are_made_per_use() -> None:
    one, other = job("chain"), job("chain")
    assert one.link is not other.link and one.mesh is not other.mesh
    assert plain_run(one, seeded(one), {}).team.assignment is not plain_run(one, seeded(one), {}).team.assignment
