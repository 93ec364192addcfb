"""PowerSGD: send every gradient matrix as the product of two thin ones, which workers can sum before they multiply.

    P = sum_w M_w Q        orthonormal columns: P'        Q = sum_w M_w^T P'        sum_w M_w  ~  P' Q^T

r (rows + columns) numbers instead of rows * columns. Each step starts with the previous step's Q, so that over the
steps P' turns towards the largest directions of the gradient (power iteration). Tensors that are no matrices, or too
small to gain, are sent whole.

    numbers ----> first ----> summed between workers ----> second ----> summed ----> add, warm
                  P of all                                 Q of all, and the uncompressed tensors

Each worker computes P' from the same sum, so machines that round alike get the same bits.
Vogels, Karimireddy, Jaggi: PowerSGD, 2019, arXiv 1905.13727.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoestring.core.errors import Mistake


class Matrix(NamedTuple):
    start: int  # position of its first number in the bucket
    rows: int
    columns: int

    def of(self, numbers: Tensor) -> Tensor:
        return numbers[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


def check_rank(rank: int) -> None:
    if rank < 1:
        raise Mistake(f"rank {rank} would send nothing of a matrix: it must be 1 or more; 4 is usual")


class PowerSGD:
    """The codec of a bucket that holds gradients of these shapes, one after another."""

    error = 1.0  # of each matrix, Euclidean norm: at most all is left out; only rounding if its rank is r or less

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int = 4, seed: int = 0) -> None:
        check_rank(rank)
        self.rank = rank
        self.matrices: list[Matrix] = []
        self.plain: list[slice] = []  # ranges that are sent uncompressed
        start = 0
        for shape in shapes:
            rows, count = (shape[0] if shape else 1), prod(shape)
            if len(shape) > 1 and count and rank * (rows + count // rows) < count:
                self.matrices.append(Matrix(start, rows, count // rows))
            else:
                self.plain.append(slice(start, start + count))
            start += count
        draw = np.random.default_rng(seed)  # the same on all workers, and independent of every other generator
        self.fresh = [
            torch.from_numpy(draw.standard_normal((matrix.columns, rank), np.float32)) for matrix in self.matrices
        ]
        self.right = self.fresh  # Q of every matrix
        self.left: list[Tensor] = []  # P' of every matrix

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers in the first message and in the second.

        >>> PowerSGD([(100, 50), (100,)], rank=2).counts
        (200, 200)
        """
        plain = sum(part.stop - part.start for part in self.plain)
        return self.rank * sum(each.rows for each in self.matrices), self.rank * sum(
            each.columns for each in self.matrices
        ) + plain

    def first(self, numbers: Tensor) -> Tensor:
        """P = M Q of every matrix, to be summed between workers."""
        self.right = [right.to(numbers.device) for right in self.right]
        parts = [matrix.of(numbers) @ right for matrix, right in zip(self.matrices, self.right, strict=True)]
        return torch.cat([numbers[:0], *(part.flatten() for part in parts)])

    def second(self, numbers: Tensor, first: Tensor) -> Tensor:
        """Q = M^T P' of every matrix and the uncompressed tensors, to be summed between workers; `first` is the sum."""
        thin = first.split([matrix.rows * self.rank for matrix in self.matrices])
        self.left = [torch.linalg.qr(part.view(-1, self.rank)).Q for part in thin]
        parts = [matrix.of(numbers).mT @ left for matrix, left in zip(self.matrices, self.left, strict=True)]
        return torch.cat([numbers[:0], *(part.flatten() for part in parts), *(numbers[part] for part in self.plain)])

    def add(self, second: Tensor, total: Tensor, times: float = 1.0) -> None:
        """total += times (P' Q^T and the uncompressed tensors); `second` is the sum, or one worker's own part of it.

        Subtracting a worker's own part from what it owed leaves what it keeps for the next step.
        """
        for matrix, left, right in zip(self.matrices, self.left, self.rights(second), strict=True):
            matrix.of(total).addmm_(left, right.mT, alpha=times)
        start = second.numel() - sum(part.stop - part.start for part in self.plain)
        for part in self.plain:
            end = start + part.stop - part.start
            total[part].add_(second[start:end], alpha=times)
            start = end

    def warm(self, second: Tensor) -> None:
        """Start the next step with this sum's Q, or with the initial Q where it is zero or not finite, since it would
        stay so."""
        self.right = [
            rescale_columns(right, fresh.to(right.device))
            for right, fresh in zip(self.rights(second), self.fresh, strict=True)
        ]

    def rights(self, second: Tensor) -> Iterator[Tensor]:
        start = 0
        for matrix in self.matrices:
            yield second[start : start + matrix.columns * self.rank].view(-1, self.rank)
            start += matrix.columns * self.rank

    def state_dict(self) -> dict[str, Any]:
        return {"right": list(self.right)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.right = [right.clone() for right in state["right"]]


def rescale_columns(right: Tensor, fresh: Tensor) -> Tensor:
    """Columns scaled to 1 as their largest number, so that squares of huge or tiny gradients never occur."""
    largest = right.abs().amax(0)
    return torch.where((largest > 0) & largest.isfinite(), right / largest, fresh)
