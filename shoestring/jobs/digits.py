"""A small conv net with batch norm on scikit-learn's 1,797 handwritten digits of 8x8 pixels.

`shoestring federate digits` divides them among devices with different mixes of digits: the lower --alpha, the fewer
digits per device. A fifth of a device's records is held out to evaluate it. With 100 devices of 18 digits each and 10 in a round, 20
rounds reach an accuracy of 0.94 to 0.96 on them (four seeds).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring import Dirichlet, Job, Local
from shoestring.core.command_line.extras import require


def digits() -> torch.utils.data.TensorDataset:
    require("sklearn")
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.utils.data.TensorDataset(
        torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.work = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.work(x))


def job(
    width: int = 32,
    depth: int = 6,
    batch: int = 64,
    steps: int = 100,
    rate: float = 1e-3,
    seed: int = 0,
    alpha: float = 0.5,
) -> Job:
    return Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            *(Residual(width) for _ in range(depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        ),
        data=digits,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        batch=batch,
        steps=steps,
        seed=seed,
        clients=Dirichlet(alpha),
        local=Local(epochs=5, batch=10, lr=0.1, held_out=0.2),
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
    )
