"""The time that a step waits for its batch is part of the step's predicted time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoestring.core.costs.ledger import Ledger
from shoestring.core.job import Job
from shoestring.measure.load import Effort
from shoestring.training.evidence.fetching import seconds_waiting


@dataclass
class Slow(Dataset[Any]):
    """Samples each of which takes a quarter of a second by a clock of its own."""

    count: int = 64
    clock: float = field(default=0.0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        self.clock += 0.25
        return torch.zeros(4), torch.tensor(0)


def waiting(step: float, **settings: Any) -> float:
    data = Slow()
    job = Job(**{"model": lambda: nn.Linear(4, 2), "data": lambda: data, "batch": 2, "steps": 9} | settings)
    return seconds_waiting(job, step, clock=lambda: data.clock, now=lambda: Effort(0.0, 0.0))


def test_a_step_waits_for_all_of_its_batch_where_nobody_fetches_ahead() -> None:
    assert waiting(step=0.1) == waiting(step=10.0) == 0.5


@pytest.mark.parametrize(
    ("workers", "step", "expected"), [(1, 0.1, 0.4), (4, 0.1, 0.025), (4, 0.2, 0.0), (1, 9.0, 0.0)]
)
def test_processes_that_fetch_ahead_work_while_a_step_computes(workers: int, step: float, expected: float) -> None:
    assert waiting(step, workers=workers) == pytest.approx(expected)


@pytest.mark.parametrize("data", [[], [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))]])
def test_data_of_no_batch_or_of_one_are_no_reason_to_fail(data: list[Any]) -> None:
    assert waiting(1.0, data=lambda: iter(data)) == 0.0


FILE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from shoestring import Job

class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, number):
        drawn = torch.randn(1_500_000)
        return drawn[:4], 0

def job(): return Job(model=lambda: nn.Linear(4, 2), data=Samples, batch=4, steps=8)
"""


def test_waiting_for_data_is_part_of_every_predicted_step(tmp_path: Path) -> None:
    ledger = Ledger((), waiting=0.2)
    assert ledger.seconds == ledger.in_pieces(1).seconds == 0.2 and Ledger(()).seconds == 0.0
