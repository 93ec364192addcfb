"""A job whose first and last layer are one weight, which two stages use. Matrices and the rest decay differently."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job

WORDS, WIDTH = 30, 16


class TiedWords(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH), nn.Dropout(dropout)
            )
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight
        for block in self.body:
            x = x + block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [one for one in weights if one.dim() > 1], "weight_decay": 0.3},
            {"params": [one for one in weights if one.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def job(dropout: float = 0.0) -> Job:
    ids = torch.randint(WORDS, (6, 8, 8), generator=torch.Generator().manual_seed(1))  # six batches
    return Job(
        model=lambda: TiedWords(dropout),
        data=lambda: list(ids),
        optimizer=optimizer,
        clip=0.5,
        steps=6,
        loss=lambda scores, ids: functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    )
