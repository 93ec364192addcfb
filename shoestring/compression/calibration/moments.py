"""Second moments of a layer's inputs, M = sum of x x^T, and their Cholesky factors, kept on disk.

A 3 x 3 convolution over 512 channels has a moment of 85 MB, nine times its weight. So moments and factors are stored in
a scratch file as row panels of their lower triangle, and all computations process one panel after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.compression.calibration.scratch import Scratch, ScratchTensor

PANEL = 256  # rows of a panel
WAITING = 4  # inputs are added once there is one for every so many columns
DAMPING = 0.01  # fraction of the mean second moment added to the diagonal, so that errors in unseen inputs count too


@dataclass
class SecondMoment:
    """M in panels: panel n holds rows [256 n, 256 (n + 1)), up to the last column of the diagonal block."""

    scratch: Scratch
    columns: int
    squares: Tensor  # the diagonal, in memory
    panels: list[ScratchTensor] = field(default_factory=list)
    waiting: list[ScratchTensor] = field(default_factory=list)  # inputs that are not in M yet
    known_factor: Factor | None = None

    @classmethod
    def zero(cls, columns: int, scratch: Scratch) -> SecondMoment:
        return cls(scratch, columns, torch.zeros(columns))

    @classmethod
    def of(cls, matrix: Tensor, scratch: Scratch | None = None) -> SecondMoment:
        """Store a whole matrix."""
        made = cls(scratch or Scratch(), len(matrix), matrix.diagonal().detach().float().clone())
        made.panels = [
            made.scratch.keep(matrix[begin:end, :end].detach().float()) for begin, end in panel_bounds(made.columns)
        ]
        return made

    def add(self, rows: Tensor) -> None:
        """Add x x^T of further inputs (inputs, columns). Small batches are collected in the file first, because adding
        rewrites all panels."""
        self.known_factor = None
        self.waiting.append(self.scratch.keep(rows))
        if sum(one.shape[0] for one in self.waiting) >= self.columns // WAITING:
            self.finish()

    def finish(self) -> None:
        """Add the collected inputs; called before anything is read."""
        if not self.waiting:
            return
        rows, self.waiting = self.scratch.read_rows(self.waiting), []
        for number, (begin, end) in enumerate(panel_bounds(self.columns)):
            new = rows[:, begin:end].T @ rows[:, :end]
            if number < len(self.panels):
                new += self.scratch.read(self.panels[number])
                self.scratch.write(self.panels[number], new)
            else:
                self.panels.append(self.scratch.keep(new))
            self.squares[begin:end] = new[:, begin:].diagonal()

    def copy(self) -> SecondMoment:
        self.finish()
        panels = [self.scratch.keep(self.scratch.read(place)) for place in self.panels]
        return SecondMoment(self.scratch, self.columns, self.squares.clone(), panels)

    def diagonal(self) -> Tensor:
        self.finish()
        return self.squares

    def rows(self, chosen: Tensor) -> Tensor:
        """Whole rows of M (chosen, columns)."""
        self.finish()
        found = torch.empty(len(chosen), self.columns)
        for place, (begin, end) in zip(self.panels, panel_bounds(self.columns), strict=True):
            panel = self.scratch.read(place)
            here = (chosen >= begin) & (chosen < end)
            found[here, :end] = panel[chosen[here] - begin]
            above = chosen < begin
            found[above, begin:end] = panel[:, chosen[above]].T
        return found

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.columns))

    def error(self, off: Tensor) -> float:
        """off M off^T, summed over the rows of `off`."""
        self.finish()
        total = 0.0
        for place, (begin, end) in zip(self.panels, panel_bounds(self.columns), strict=True):
            panel, mine = self.scratch.read(place), off[:, begin:end]
            panel[:, :begin] *= 2  # for the upper triangle
            total += float(((off[:, :end] @ panel.T) * mine).sum(dtype=torch.float64))
        return total

    def factor(self) -> Factor | None:
        """Cholesky factor, with as little damping as needed; None if even 100 times the damping does not make M
        positive definite."""
        if self.known_factor is None:
            self.finish()
            mean = float(self.squares.double().mean()) or 1.0
            tried = (cholesky_factor(self, times * DAMPING * mean) for times in (1, 10, 100))
            self.known_factor = next((one for one in tried if one is not None), None)
        return self.known_factor


@dataclass(frozen=True)
class Factor:
    """L with L L^T = M + damping I, with rows and columns permuted by `order` (small inputs first), in panels like
    M."""

    scratch: Scratch
    order: Tensor
    damping: float
    panels: tuple[ScratchTensor, ...]
    diagonal: Tensor

    def unit_panel(self, number: int) -> Tensor:
        """A panel of L with every column divided by its diagonal element."""
        panel = self.scratch.read(self.panels[number])
        return panel.div_(self.diagonal[: panel.shape[1]])


def cholesky_factor(moment: SecondMoment, damping: float) -> Factor | None:
    """Blocked Cholesky factorization in float64, stored in float32; None if M is not positive definite."""
    scratch, order = moment.scratch, torch.argsort(moment.squares, descending=True).flip(0)
    panels: list[ScratchTensor] = []
    diagonal = torch.empty(moment.columns)
    for begin, end in panel_bounds(moment.columns):
        mine = moment.rows(order[begin:end])[:, order[:end]].double()
        mine[:, begin:].diagonal().add_(damping)
        for place, (first, last) in zip(panels, panel_bounds(moment.columns), strict=False):
            before = scratch.read(place).double()
            mine[:, first:last] -= mine[:, :first] @ before[:, :first].T
            mine[:, first:last] = torch.linalg.solve_triangular(
                before[:, first:].T, mine[:, first:last], upper=True, left=False
            )
        mine[:, begin:], failed = torch.linalg.cholesky_ex(mine[:, begin:] - mine[:, :begin] @ mine[:, :begin].T)
        if int(failed):
            return None
        diagonal[begin:end] = mine[:, begin:].diagonal()
        panels.append(scratch.keep(mine.float()))
    return Factor(scratch, order, damping, tuple(panels), diagonal)


def panel_bounds(columns: int) -> list[tuple[int, int]]:
    """
    >>> panel_bounds(300)
    [(0, 256), (256, 300)]
    """
    return [(begin, min(begin + PANEL, columns)) for begin in range(0, columns, PANEL)]
