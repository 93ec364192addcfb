"""Blocks that can't be computed again are refused in planning, with the reason, and plain training still does."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.training.library import plan
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from tests.training.memory.recompute.test_block_state import Codebook, Elsewhere, OverwritesInput, job_of

JOB = """
from shoestring import Job
from tests.training.memory.recompute.test_block_state import Elsewhere, job_of
from torch import nn

def job() -> Job:
    return job_of(lambda: nn.Sequential(nn.Linear(8, 8), Elsewhere(), Elsewhere()))
"""


@pytest.mark.parametrize("block", [Elsewhere, OverwritesInput])
def test_the_planner_tries_whether_blocks_can_be_computed_again(block: type[nn.Module]) -> None:
    made = job_of(lambda: nn.Sequential(nn.Linear(8, 8), block(), block()))
    ledger = Planner(made, Hardware()).ledger()
    for technique in (Checkpoint(every=1), OffloadModel()):
        assert technique.refusal(ledger).startswith("the block ")
    found = Planner(made, Hardware()).outcome(None)
    assert "Checkpoint" in dict(found.refused) and not any(
        isinstance(one, Checkpoint) for one in found.chosen.techniques
    )


def test_blocks_that_can_be_computed_again_are_not_refused() -> None:
    ledger = Planner(job_of(lambda: nn.Sequential(nn.Linear(8, 8), Codebook(), Codebook())), Hardware()).ledger()
    assert not Checkpoint(every=1).refusal(ledger)


def test_a_job_file_is_tried_in_a_worker_and_the_technique_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "awkward.py").write_text(JOB)
    with pytest.raises(
        Mistake, match=r"Checkpoint\(every=1\) can.t be used for this job: the block \d of the model computes"
    ):
        plan(tmp_path / "awkward.py", use=["Checkpoint(every=1)"])
