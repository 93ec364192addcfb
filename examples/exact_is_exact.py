"""The same bits with half the activations: plain training and a plan side by side."""

import torch
from torch import nn

from shoestring import Job, verify
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint

x, y = torch.randn(64, 128), torch.randint(10, (64,))
job = Job(
    model=lambda: nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 128)) for _ in range(8)),
        nn.Linear(128, 10),
    ),
    data=lambda: [(x, y)] * 10,
)
same_bits, difference = verify(job, (Checkpoint(every=2), StepInBackward()), 10)
print("same bits after ten steps:", same_bits, "largest difference:", difference)
