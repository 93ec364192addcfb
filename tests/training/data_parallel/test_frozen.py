"""What a model or its data may do in the middle of a run: freeze weights, which a group trains as one process does; give an empty batch,
which is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoestring import Job, Mistake
from shoestring.core.batch import split
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import MODELS
from tests.training.members import Group

JOB = Path(__file__).with_name("frozen.py")


def trained(folder: Path, world: int, *techniques: Technique) -> dict[str, torch.Tensor]:
    Group(folder, world, JOB, techniques, 6, weights=str(folder / "weights")).results()
    return dict(TensorFile(folder / "weights").items())


def test_weights_that_are_frozen_in_the_middle_of_a_run_are_frozen_in_a_group_too(tmp_path: Path) -> None:
    plain = trained(tmp_path / "one", 1)
    for number, technique in enumerate((DataParallel(), Shard(1), Shard(2), Shard(3))):
        group = trained(tmp_path / str(number), 2, technique)
        assert max(float((plain[name] - group[name]).abs().max()) for name in plain) < 1e-5, technique


def test_an_empty_batch_in_a_group_is_told_with_its_number() -> None:
    full = MODELS["chain"][1]()
    made = Job(
        model=MODELS["chain"][0], data=lambda: [full, tuple(part[:0] for part in full)], mesh=on_one_axis(Link(0, 2))
    )
    feed = Feed(made)
    next(feed)
    with pytest.raises(
        Mistake, match="batch 2 of the job's data has no samples: there is nothing for 2 workers to train on"
    ):
        next(feed)


def test_an_empty_batch_that_is_to_be_split_is_told() -> None:
    with pytest.raises(Mistake, match="a batch without samples can't be split"):
        split(torch.zeros(0, 3), 2)
