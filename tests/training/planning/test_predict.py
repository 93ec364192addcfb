"""The process is its tensors and an overhead; what a plan does to the tensors must not change the overhead."""

from __future__ import annotations

from pathlib import Path

from shoestring.processes.launch import run_worker
from shoestring.training.evidence.tasks import AnchorTask
from shoestring.training.memory.allocator import following

RECURRENT = """
import torch
from torch import nn
from shoestring import Job

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 10)
    def forward(self, x):
        return self.head(self.memory(x)[0][:, -1])

def job() -> Job:
    x, y = torch.randn(256, 64, 32), torch.zeros(256, dtype=torch.long)
    return Job(model=Recurrent, data=lambda: [(x, y)] * 9, steps=3)
"""


def test_a_workspace_that_its_kernel_leaves_half_empty_does_not_make_the_rest_of_the_process_look_smaller(
    tmp_path: Path,
) -> None:
    path = tmp_path / "recurrent.py"
    path.write_text(RECURRENT)
    over = (
        run_worker(AnchorTask(file=str(path), variants={"": ()}, memory=True), following().environment)
        .steps[""]
        .overheads
    )
    assert min(over.values()) > over["forward (start)"] - 2**21
