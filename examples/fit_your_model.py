"""Your own model and data, in place, within a memory budget: three lines."""

import torch
from torch import nn

import shoestring

model = nn.Sequential(
    *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)), nn.Linear(256, 10)
)
draw = torch.Generator().manual_seed(0)
batches = [(torch.randn(512, 256, generator=draw), torch.randint(10, (512,), generator=draw)) for _ in range(5)]

fitted = shoestring.fit(
    model, lambda output, batch: nn.functional.cross_entropy(output, batch[1]), batches, memory="1GiB"
)

plain, chosen = fitted.outcome.plain, fitted.outcome.chosen
print(f"{chosen}: {plain.predicted['peak_bytes']:,} -> {chosen.predicted['peak_bytes']:,} bytes of tensors")
print("losses", *(f"{loss:.3f}" for loss in fitted.losses))
