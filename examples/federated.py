"""A model that a million phones train together: each keeps its own records, and only updates leave it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoestring
from shoestring import Job, Local, Numbered

truth = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def records(number: int) -> TensorDataset:
    """What one phone has: 20 samples around a habit of its own. Nobody else ever reads them."""
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(20, 16, generator=draw) + 0.5 * torch.randn(16, generator=draw)
    return TensorDataset(x, (x @ truth).argmax(1))


job = Job(
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
    data=lambda: records(0),
    clients=lambda: Numbered(1_000_000, records),  # made when a phone is chosen, so a million cost nothing
    local=Local(epochs=2, batch=10, lr=0.1, held_out=0.2),
    metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
)
found = shoestring.federate(job, rounds=20, per_round=50)

print(f"loss {found.losses[0]:.2f} -> {found.losses[-1]:.2f}")
print(f"accuracy on what the phones held out: {found.before[-1]['accuracy']:.3f}")
