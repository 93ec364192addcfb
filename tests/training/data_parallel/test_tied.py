"""A weight that two stages of a pipeline use, where copies of the model divide the optimizer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.technique import TrainingTechnique as Technique
from tests.records import records
from tests.training.data_parallel.test_promises_of_groups import TOLERANCE, outcomes
from tests.training.members import Group

JOB = Path(__file__).parents[1] / "pipeline" / "tied_words.py"
STEPS = 6


def trained(place: Path, world: int, *techniques: Technique, **words: Any) -> dict[str, torch.Tensor]:
    Group(place, world, JOB, techniques, STEPS, weights=str(place / "weights"), **words).results()
    return dict(TensorFile(place / "weights").items())


PLANS: list[tuple[Technique, ...]] = [
    (Pipeline(2, 2), Shard(1)),
    (Pipeline(2, 2, "zero-bubble"), Shard(2)),
    (Pipeline(2, 2, "interleaved", chunks=2), Shard(1)),
    (Pipeline(2, 2), DataParallel()),
]


@pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS[1:])], ids=str
)
def test_a_tied_weight_is_trained_as_in_one_process(plan: tuple[Technique, ...], tmp_path: Path) -> None:
    """With a clipped norm, in which it counts once, and groups that decay differently."""
    alone, group = trained(tmp_path / "one", 1), trained(tmp_path / "four", 4, *plan)
    assert max(float((alone[name] - group[name]).abs().max()) for name in alone) < 1e-5
    assert torch.equal(group["head.weight"], group["words.weight"])


def test_a_run_that_goes_on_from_a_checkpoint_has_the_state_of_a_tied_weight_and_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    plan, flags = (Pipeline(2, 2), Shard(1)), {"dropout": 0.2}
    whole = trained(tmp_path / "whole", 4, *plan, flags=flags)
    words: dict[str, Any] = {"folder": str(tmp_path / "parted"), "cadence": {"steps": 2}, "flags": flags}
    Group(tmp_path / "parted", 4, JOB, plan, 4, **words).results()
    found = trained(tmp_path / "parted", 4, *plan, **words)
    assert [event["step"] for event in records(tmp_path / "parted") if event["event"] == "begun"] == [0, 4]
    assert all(torch.equal(value, found[name]) for name, value in whole.items())


@pytest.mark.slow
def test_memory_and_bytes_of_a_tied_gpt2_are_as_predicted(tmp_path: Path) -> None:
    wanted: list[tuple[Technique, ...]] = [(Pipeline(2, 2), Shard(1)), (Pipeline(2, 2, "zero-bubble"), Shard(2))]
    for plan, outcome in zip(wanted, outcomes("gpt2", 4, wanted, tmp_path, more=["still", "clip"]), strict=True):
        for one in outcome["workers"]:
            assert one["peaks"][0] == one["peaks"][1] and one["sent"][0] == one["sent"][1], plan
            assert one["apart"] <= TOLERANCE, plan
