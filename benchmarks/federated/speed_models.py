"""What is trained in the benchmark of speed: three models and their clients' data, the same for everybody. Imports torch alone.

mlp           784-64-10, batch 10, about 100 images a client
mlp200        784-200-10, the same                                  (the width of McMahan et al. 2017, arXiv 1602.05629)
mlp200e5      the same with 5 epochs, as there
cnn           two 5x5 convolutions, 16 and 32 channels, batch 10    (a small one of the same paper's kind)
transformer   two layers, width 64, 32 bytes of context, batch 4
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
RATE = 0.05


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def wide_mlp() -> nn.Module:
    return mlp(200)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.behind = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.mix(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Transformer(nn.Module):
    def __init__(self, words: int = 256, width: int = 64, length: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.word(x) + self.place(torch.arange(x.shape[1])))))


def of_classes(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: int
    samples: int  # of a client, about: between 3/4 and 5/4 of it
    clients: int  # of a round
    text: bool = False
    epochs: int = 1

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Every client's inputs and targets."""
        generator = torch.Generator().manual_seed(1)
        least, most = self.samples * 3 // 4, self.samples * 5 // 4
        counts = (
            torch.linspace(least, most, self.clients).long()[torch.randperm(self.clients, generator=generator)].tolist()
        )
        pool = text(sum(counts), generator) if self.text else images(sum(counts), generator)
        return [(x.clone(), y.clone()) for x, y in zip(*(one.split(counts) for one in pool), strict=True)]


CASES = {
    case.name: case
    for case in (
        Case("mlp", mlp, of_classes, 10, 100, 128),
        Case("mlp200", wide_mlp, of_classes, 10, 100, 128),
        Case("mlp200e5", wide_mlp, of_classes, 10, 100, 64, epochs=5),
        Case("cnn", cnn, of_classes, 10, 100, 64),
        Case("transformer", Transformer, of_tokens, 4, 40, 64, text=True),
    )
}


@cache
def prepared(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The model and the data of a case, made once a process."""
    torch.set_num_threads(1)
    return CASES[name].made(), CASES[name].data()


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST, or random numbers where that is not there: they take the same time."""
    order = torch.randperm(60_000, generator=generator)[:count]
    if not FASHION.exists():
        return torch.randn(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)
    pixels, labels = (
        read(FASHION / f"train-{name}-ubyte.gz", header) for name, header in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return pixels.view(-1, 1, 28, 28)[order].float() / 255, labels[order].long()


def read(path: Path, header: int) -> Tensor:
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)


def text(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn: Any = torch.randint(256, (count, 33), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
