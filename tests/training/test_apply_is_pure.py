"""Applying a technique makes another run: that which it was given, its job and its links stay as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.mesh import imagined_mesh
from shoestring.core.run import plain_run
from shoestring.measure.blocks import blocks
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.data_parallel.asynchronous import Asynchronous
from shoestring.training.data_parallel.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.shard import Shard
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.sequence.sequence_pipeline import SequencePipeline
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.technique import mesh_sizes
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


def snapshot(value: Any) -> dict[str, Any]:
    """The fields of a value, and what is in those that are mappings."""
    found = {field.name: value.__dict__[field.name] for field in fields(value)}
    return found | {f"in {name}": dict(one) for name, one in found.items() if isinstance(one, Mapping)}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("technique", [*(kind(**REQUIRED.get(kind, {})) for kind in CATALOGUE), *MORE], ids=str)
def test_apply_leaves_what_it_was_given_alone(technique: Technique, rank: int, tmp_path: Path) -> None:
    name = "llama" if isinstance(technique, (TensorParallel, SequencePipeline)) else "chain"
    made = replace(job(name), mesh=imagined_mesh(mesh_sizes((technique,), 6), rank))
    model = seeded(made)
    run = replace(plain_run(made, model, blocks(model)), folder=tmp_path, example=lambda: next(iter(made.data())))
    before = snapshot(run), snapshot(made), dict(vars(run.link)), dict(vars(run.assignment))
    applied = technique.apply(run)
    assert (snapshot(run), snapshot(made), vars(run.link), vars(run.assignment)) == before
    assert run.link is made.link and applied.link is run.link


def test_defaults_are_made_per_use() -> None:
    one, other = job("chain"), job("chain")
    assert one.link is not other.link and one.mesh is not other.mesh
    assert plain_run(one, seeded(one), {}).assignment is not plain_run(one, seeded(one), {}).assignment
