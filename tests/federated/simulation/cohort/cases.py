"""Models, jobs and devices shared by the tests of simulation methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoestring.core.clients.local import Local
from shoestring.core.job import Job
from shoestring.federated.devices.records import Records, records_of
from shoestring.federated.model.layout import Layout, layout_of
from shoestring.federated.simulation.cohort import Engine, MethodChoice

CLOSE = 1e-5
COUNTS = (25, 33, 7, 1, 12)  # uneven, one shorter than a batch, one with a single sample


def images(count: int, generator: torch.Generator, side: int = 12) -> TensorDataset:
    return TensorDataset(
        torch.randn(count, 1, side, side, generator=generator), torch.randint(5, (count,), generator=generator)
    )


def tokens(count: int, generator: torch.Generator) -> TensorDataset:
    drawn = torch.randint(11, (count, 7), generator=generator)
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def mlp(*activations: nn.Module, bias: bool = True) -> nn.Sequential:
    between = activations or (nn.ReLU(), nn.Tanh())
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(144, 17, bias=bias),
        between[0],
        nn.Sequential(nn.Linear(17, 9), between[-1]),
        nn.Dropout(0.0),
        nn.Linear(9, 5, bias=bias),
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, bias=False),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 24)
        self.end, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight  # shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        query, key, value = self.mix(self.norm(x)).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(self.end(x + mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def of_tokens(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def job_of(model: Callable[[], nn.Module], local: Local, **more: Any) -> Job:
    return Job(model=model, data=list, local=local, **more)


def devices_of(job: Job, counts: Sequence[int] = COUNTS, data: Callable[..., Any] = images) -> list[Records]:
    generator = torch.Generator().manual_seed(5)
    return [records_of(job, f"device {place}", data(count, generator), seed=1) for place, count in enumerate(counts)]


def started(job: Job) -> tuple[Layout, Tensor]:
    torch.manual_seed(3)
    model = job.model()
    layout = layout_of(model)
    return layout, layout.row(model)


def engine(job: Job, kind: str, chunk: int = 8) -> Engine:
    return Engine(job, started(job)[0], MethodChoice(kind, chunk, ""))


def apart(found: Tensor, right: Tensor, start: Tensor) -> float:
    """The largest |difference| / |update|, beyond the plain loop's own rounding in some steps."""
    rounded = 4 * torch.finfo(torch.float32).eps * start.norm(dim=-1)
    return float((((found - right).norm(dim=1) - rounded).clamp_min(0) / (right - start).norm(dim=1)).max())
