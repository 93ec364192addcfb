"""A recurrent network with adaptive computation time: its halting probabilities decide how many steps of the cell each
element takes.

    s_t^n = cell([x_t, 1 if n = 1 else 0], s_t^{n-1}),   s_t^0 = s_{t-1}
    h_t^n = sigmoid(w . s_t^n + b)
    s_t   = sum_n p_t^n s_t^n                             N, R and p as in ponder.py; both states of an LSTM

Graves: Adaptive Computation Time for Recurrent Neural Networks, 2016, arXiv 1603.08983. In evaluation, halted rows are
not computed any further: the cell only gets running rows. The result equals that of computing all rows with a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.exits.ponder import EPSILON, Pondered, check_limits, halt
from shoestring.core.errors import Mistake

CELLS: dict[str, type[nn.RNNCell] | type[nn.GRUCell] | type[nn.LSTMCell]] = {
    "rnn": nn.RNNCell,
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}

State = tuple[Tensor, ...]  # (h,), for an LSTM (h, c)


class Element(NamedTuple):
    """The result of pondering over one element of every row."""

    state: State
    ponder: Tensor  # (rows,)
    steps: Tensor  # (rows,)


class AdaptiveRecurrent(nn.Module):
    """Maps sequences (rows, time, features), with `lengths` (rows,) if they vary, to a Pondered of hidden states (rows,
    time, width).

    Positions beyond a row's length are 0 and take no step. The ponder cost of a row is the mean over its elements.
    """

    def __init__(
        self,
        features: int,
        width: int,
        cell: str = "gru",
        max_steps: int = 20,
        epsilon: float = EPSILON,
        bias: float = 1.0,
    ) -> None:
        super().__init__()
        if cell not in CELLS:
            raise Mistake(f"cell={cell!r}: there are {', '.join(CELLS)}")
        check_limits(max_steps, epsilon)
        self.cell = CELLS[cell](features + 1, width)
        self.halting = nn.Linear(width, 1)
        nn.init.constant_(self.halting.bias, bias)  # few steps at first
        self.width, self.max_steps, self.epsilon = width, max_steps, epsilon

    def forward(self, x: Tensor, lengths: Tensor | None = None, compact: bool | None = None) -> Pondered:
        """`compact`: compute only running rows; by default in evaluation."""
        rows, time = x.shape[:2]
        ponder = self.compute_compact if (not self.training if compact is None else compact) else self.compute_masked
        lengths = torch.full((rows,), time, device=x.device) if lengths is None else lengths.to(x.device)
        state = tuple(x.new_zeros(rows, self.width) for _ in range(2 if isinstance(self.cell, nn.LSTMCell) else 1))
        outputs, ponders, steps = [], [], []
        for place in range(time):
            here = (lengths > place).nonzero()[:, 0]
            if len(here) == rows:
                found = ponder(x[:, place], state)
            else:  # rows that have ended keep their state
                some = ponder(x[here, place], tuple(one[here] for one in state))
                empty = x.new_zeros(rows)
                found = Element(
                    tuple(old.index_copy(0, here, new) for old, new in zip(state, some.state, strict=True)),
                    empty.index_copy(0, here, some.ponder),
                    empty.long().index_copy(0, here, some.steps),
                )
            state = found.state
            outputs.append(torch.where((lengths > place)[:, None], state[0], torch.zeros_like(state[0])))
            ponders.append(found.ponder)
            steps.append(found.steps)
        mean = torch.stack(ponders, 1).sum(1) / lengths.clamp(min=1)
        return Pondered(torch.stack(outputs, 1), mean, torch.stack(steps, 1))

    def step(self, x: Tensor, state: State, first: bool) -> tuple[State, Tensor]:
        """The state after one step of the cell, and the halting probabilities."""
        flagged = torch.cat((x, x.new_full((len(x), 1), float(first))), 1)
        found = self.cell(flagged, state if len(state) > 1 else state[0])
        after: State = found if isinstance(found, tuple) else (found,)
        return after, torch.sigmoid(self.halting(after[0]))[:, 0]

    def compute_masked(self, x: Tensor, state: State) -> Element:
        """All rows until the last one has halted, with weight 0 for halted ones."""
        mean = tuple(torch.zeros_like(one) for one in state)
        total, remainder = x.new_zeros(len(x)), x.new_zeros(len(x))
        running, steps = torch.ones_like(total, dtype=torch.bool), torch.zeros_like(total, dtype=torch.long)
        for number in range(self.max_steps):
            state, probability = self.step(x, state, number == 0)
            found = halt(probability, total, number == self.max_steps - 1, self.epsilon)
            weight = found.weight * running
            mean = tuple(one + weight[:, None] * new for one, new in zip(mean, state, strict=True))
            remainder, steps = remainder + found.remainder * running, steps + running
            total, running = found.total, running & ~found.ends
            if not running.any():
                break
        return Element(mean, steps + remainder, steps)

    def compute_compact(self, x: Tensor, state: State) -> Element:
        """The same, computing only the rows that still run."""
        mean = tuple(torch.zeros_like(one) for one in state)
        total, remainder = x.new_zeros(len(x)), x.new_zeros(len(x))
        rows, steps = torch.arange(len(x), device=x.device), torch.zeros(len(x), dtype=torch.long, device=x.device)
        for number in range(self.max_steps):
            if not len(rows):
                break
            state, probability = self.step(x, state, number == 0)
            found = halt(probability, total, number == self.max_steps - 1, self.epsilon)
            mean = tuple(
                one.index_add(0, rows, found.weight[:, None] * new) for one, new in zip(mean, state, strict=True)
            )
            remainder = remainder.index_add(0, rows, found.remainder)
            steps[rows] += 1
            on = (~found.ends).nonzero()[:, 0]
            x, state, total, rows = x[on], tuple(one[on] for one in state), found.total[on], rows[on]
        return Element(mean, steps + remainder, steps)
