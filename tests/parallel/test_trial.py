"""A trial of a group that is imagined: its bytes are right, its numbers mean nothing and are not complained of."""
from __future__ import annotations

from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.technique import described
from shoestring.parallel.shard import Shard
from shoestring.worker import trial

JOB = """
import torch
from torch import nn
from shoestring import Job

def job() -> Job:
    return Job(model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)), nn.Linear(64, 4)),
               data=lambda: [(torch.randn(8, 64), torch.arange(8) % 4)] * 8)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trial_of_an_imagined_group_asks_for_no_finite_loss(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr("shoestring.loop.math.isfinite", lambda loss: False)   # as what was not gathered may lead to
    task = {"file": str(tmp_path / "job.py"), "flags": {}, "techniques": [described(Shard(stage))], "steps": 3, "place": (0, 2)}
    assert trial(task, lambda event: None)["steps"] == 3


def test_a_trial_of_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr("shoestring.loop.math.isfinite", lambda loss: False)
    with pytest.raises(Mistake, match="the loss became"):
        trial({"file": str(tmp_path / "job.py"), "flags": {}, "techniques": [], "steps": 3}, lambda event: None)
