"""Models with chains of blocks, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.compression.exits import Head


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(x)


def chain(width: int = 8, depth: int = 4, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), *(Block(width) for _ in range(depth)), nn.Linear(width, classes)).eval()


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.work = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.work(x)
        return x + inner if inner.shape == x.shape else inner


class Stages(nn.Module):
    """As torchvision's: stages that are attributes, a tail that is code."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8))
        self.classify = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        found: Tensor = self.classify(x.mean((2, 3)))
        return found


class Attending(nn.Module):
    """A block that is given a mask and a table of positions, and gives a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.work = nn.MultiheadAttention(width, 2, batch_first=True), nn.Linear(width, width)

    def forward(self, hidden: Tensor, *, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        placed = hidden + positions
        found, weights = self.attend(placed, placed, placed, key_padding_mask=mask)
        return hidden + torch.tanh(self.work(found)), weights


class Tokens(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3, longest: int = 16) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, width), nn.Parameter(torch.randn(longest, width))
        self.layers, self.classify = nn.ModuleList(Attending(width) for _ in range(depth)), nn.Linear(width, 4)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden, _ = layer(hidden, mask=attention_mask == 0, positions=self.positions[: ids.shape[1]])
        return {"logits": self.classify(hidden[:, 0]), "last": hidden}


def heads_of(after: tuple[int, ...], width: int, classes: int, pool: str = "none") -> dict[int, nn.Module]:
    return {number: Head(width, classes, pool) for number in after}
