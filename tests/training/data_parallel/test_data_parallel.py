"""What groups stumble over: batches that do not divide, workers without a sample or a label, weights that nobody or only some used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.technique import TrainingTechnique as Technique
from tests.records import records
from tests.training.members import Group

JOB = Path(__file__).with_name("uneven.py")


def trained(
    folder: Path, world: int, techniques: tuple[Technique, ...], **flags: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a group, or of one process."""
    steps = len(flags.get("sizes", "6,6,6,6").split(","))
    results = Group(folder, world, JOB, techniques, steps, flags=flags, weights=str(folder / "weights")).results()
    assert all(one["losses"] == results[0]["losses"] for one in results), "all workers tell the same losses"
    return dict(TensorFile(folder / "weights").items()), results[0]["losses"]


@pytest.mark.parametrize(
    "flags",
    [
        {"sizes": "7,5,6,4"},  # parts of unequal size, and weights that only some workers used
        {"sizes": "6,1,6,2"},  # a step in which a worker has no sample
        {"sizes": "6,6,6,6", "ignored": True},  # a worker whose samples have no label: a mean over nothing
    ],
)
@pytest.mark.parametrize("techniques", [(DataParallel(),), (Shard(2), Accumulate(2)), (Shard(3),)], ids=str)
def test_an_uneven_group_trains_as_one_process_does(
    flags: dict[str, Any], techniques: tuple[Technique, ...], tmp_path: Path
) -> None:
    plain, losses = trained(tmp_path / "one", 1, (), **flags)
    group, told = trained(tmp_path / "two", 2, techniques, **flags)
    assert told == pytest.approx(losses, rel=1e-5)
    assert max(float((plain[name] - group[name]).abs().max()) for name in plain) < 1e-5
    untouched = trained(tmp_path / "none", 1, (), sizes="2", rate=0.0)[0]
    assert torch.equal(group["never.weight"], untouched["never.weight"]), (
        "weights that nobody used are not even decayed"
    )


def test_a_rate_that_grows_with_the_workers_is_reached_step_by_step(tmp_path: Path) -> None:
    """With half the rate and two workers, the rate is the job's own from the last step of the warm-up on."""
    sizes = "4,4,4"
    linear, _ = trained(tmp_path / "linear", 2, (DataParallel(linear=True),), sizes=sizes, rate=0.025)
    plain, _ = trained(tmp_path / "plain", 2, (DataParallel(),), sizes=sizes, rate=0.05)
    warm, _ = trained(tmp_path / "warm", 2, (DataParallel(linear=True, warmup=100),), sizes=sizes, rate=0.05)
    assert max(float((plain[name] - linear[name]).abs().max()) for name in plain) < 1e-6
    assert 0 < max(float((plain[name] - warm[name]).abs().max()) for name in plain) < 0.01


def test_workers_that_are_apart_meet_after_the_last_step(tmp_path: Path) -> None:
    results = Group(tmp_path, 2, JOB, [LocalSteps(h=3)], 4, flags={}, folder=str(tmp_path), weights="").results()
    sent = [event["sent"] for event in records(tmp_path) if event["event"] == "step"]
    assert sent[:2] == [0, 0] and sent[2] == sent[3] > 1000, "the fourth step is no third, and the last"
    assert [one["sent"] for one in results[0]["workers"]] == [sum(sent)] * 2


def test_compressed_gradients_come_within_reach_of_the_whole_ones(tmp_path: Path) -> None:
    _, losses = trained(tmp_path / "plain", 2, (DataParallel(),), sizes="4,4,4,4,4,4,4,4")
    _, short = trained(tmp_path / "short", 2, (CompressGradients("int8"),), sizes="4,4,4,4,4,4,4,4")
    assert short == pytest.approx(losses, rel=0.01) and short != losses


def test_models_that_do_not_follow_from_the_seed_are_refused(tmp_path: Path) -> None:
    group = Group(tmp_path, 2, JOB, [DataParallel()], 2, flags={"own": True})
    with pytest.raises(AssertionError, match="worker 1 of 2 made other weights than worker 0"):
        group.results()
