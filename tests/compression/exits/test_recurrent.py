"""Parity, where the right amount of computation is known (Graves 2016, section 3.1)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoestring
from shoestring.compression.exits import AdaptiveRecurrent, Pondered, ponder_job
from shoestring.core.job import Job

BITS = 8


class Parity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ponder, self.answer = AdaptiveRecurrent(BITS, 12, "rnn", max_steps=10, bias=-1.0), nn.Linear(12, 1)

    def forward(self, bits: Tensor) -> Pondered:
        return self.ponder(bits[:, None]).map(lambda states: self.answer(states[:, 0])[:, 0])


@pytest.mark.slow
def test_steps_grow_with_how_much_there_is_to_count() -> None:
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, BITS + 1, (128 * 100,), generator=random)
    bits = (torch.randint(0, 2, (len(lengths), BITS), generator=random) * 2.0 - 1) * (
        torch.arange(BITS) < lengths[:, None]
    )
    odd = ((bits == 1).sum(1) % 2).float()
    job = ponder_job(
        Job(
            model=Parity,
            data=lambda: TensorDataset(bits, odd),
            batch=128,
            steps=1200,
            clip=1.0,
            loss=lambda output, batch: nn.functional.binary_cross_entropy_with_logits(output, batch[1]),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        ),
        0.06,
    )
    torch.manual_seed(0)
    model = job.model()
    for _ in shoestring.train(job, (), model):
        pass
    with torch.no_grad():
        found = model.eval()(bits)
    assert float(((found.value > 0) == (odd > 0)).float().mean()) > 0.95
    by_length = [float(found.steps[lengths == one].float().mean()) for one in range(1, BITS + 1)]
    assert by_length[-1] > by_length[0] + 0.4
    assert sum(after > before for before, after in pairwise(by_length)) >= 5
