"""Top-k: workers step for themselves, tell of their largest moves, and end with one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_updates import normalizes
from shoestring.training.technique import TrainingTechnique as Technique
from tests.training.data_parallel.test_data_parallel import trained

SIZES = ",".join(["6"] * 12)


def test_with_sgd_and_everything_told_it_is_plain_averaging(tmp_path: Path) -> None:
    """SGD's steps are as long as its gradients, so the mean of the steps is the step of the mean; values are sent as bf16."""
    whole, losses = trained(tmp_path / "whole", 2, (DataParallel(),), sizes=SIZES)
    moved, told = trained(tmp_path / "moved", 2, (CompressGradients("topk", share=1.0),), sizes=SIZES)
    assert told == pytest.approx(losses, rel=1e-3)
    apart = {
        name: float((whole[name] - moved[name]).abs().max()) for name in whole if "odd" not in name
    }  # which some do not use
    assert max(apart.values()) < 2e-3


@pytest.mark.parametrize("technique", [CompressGradients("topk", share=0.1)], ids=str)
def test_a_tenth_of_the_moves_is_enough_to_learn(technique: Technique, tmp_path: Path) -> None:
    _, losses = trained(tmp_path / "moved", 2, (technique,), sizes=",".join(["8"] * 40))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_adam_and_its_kin_are_known() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2))]
    assert all(
        normalizes(kind(weights))
        for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad)
    )
    assert not normalizes(torch.optim.SGD(weights, lr=0.1))
