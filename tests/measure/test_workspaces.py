"""Operations that keep a workspace in training and none in evaluation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import shoestring
from shoestring import Job


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_an_lstm_is_trained_in_a_run_and_validated_there(tmp_path: Path) -> None:
    def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, 1, 0, 1]))
            for seed in range(3)
        ]

    job = Job(model=Last, data=batches, held_out=batches, steps=3, every=1)
    found = list(shoestring.train(job, (), run=tmp_path / "run"))
    assert len(found) == 3 and all("loss" in one.metrics for one in found)
