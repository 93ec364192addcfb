"""A job in which one worker can be made slow, and all write down which samples they train on.

How slow it is is counted, not timed: it waits until the others have begun some parts more, or does more work.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from shoestring import Job
from tests.waiting import pass_gate, until


class Points(torch.utils.data.Dataset[Any]):
    """Which of four numbers is the largest; and the sample's own number."""

    def __len__(self) -> int:
        return 6000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x[:4].argmax(), index


def few(batches: int, size: int) -> Iterator[Any]:
    for number in range(batches):
        rows = [Points()[size * number + place] for place in range(size)]
        yield (
            torch.stack([row[0] for row in rows]),
            torch.stack([row[1] for row in rows]),
            torch.tensor([row[2] for row in rows]),
        )


def begun_by(seen: str) -> Counter[int]:
    """How many parts each worker has begun."""
    with open(seen) as file:
        return Counter(int(line.split()[0]) for line in file)


def begun_by_others(seen: str, rank: int) -> int:
    return sum(count for other, count in begun_by(seen).items() if other != rank)


def job(
    slow: int = -1,
    lead: int = 0,
    most: int = 0,
    burden: int = 0,
    batch: int = 12,
    batches: int = 0,
    seen: str = "",
    rate: float = 0.01,
    clip: float = 0.0,
    norm: bool = True,
    hold: str = "",
    even: int = 0,
) -> Job:
    """slow      the rank that is slow in its forward:
    lead      the others begin so many parts meanwhile, until they have begun `most`, after which it is as fast as they are
    burden    it multiplies so many matrices more
    batches   so many, from an iterable
    seen      where to write samples
    even      so many workers begin their first three parts together, so that all have some
    hold      a folder with gates (tests/waiting.py): each worker stands still before its forward of a gate's number
    """
    calls = 0

    def forward(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        pass_gate(hold, calls)
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        if seen:
            file = os.open(seen, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.write(file, f"{rank} {' '.join(map(str, batch[2].tolist()))}\n".encode())
            os.close(file)
        if calls <= 3 and even:
            until(lambda: sum(count >= calls for count in begun_by(seen).values()) == even, "everybody's next part")
        if rank == slow and lead:
            enough = min(begun_by_others(seen, rank) + lead, most)
            until(lambda: begun_by_others(seen, rank) >= enough, "the others' next parts")
        if rank == slow:
            for _ in range(burden):
                torch.ones(64, 64) @ torch.ones(64, 64)
        output: Tensor = model(batch[0])
        return output

    return Job(
        model=lambda: nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.ReLU(), nn.Linear(32, 4)
        ),
        forward=forward,
        data=(lambda: few(batches, batch)) if batches else Points,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=rate),
        batch=batch,
        clip=clip,
    )
