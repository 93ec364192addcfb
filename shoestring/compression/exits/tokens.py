"""A universal transformer whose tokens halt one by one: the same block is applied repeatedly to tokens that still run.

    u_i   = s_i + step embedding                              of tokens that run; s_i as it was of those that have halted
    s_i  <- block(u_i; keys and values of all tokens)         of tokens that run
    h_i   = sigmoid(w . s_i + b)                              N, R, p and the output sum_n p_n s_i^n as in ponder.py

Dehghani, Gouws, Vinyals, Uszkoreit, Kaiser: Universal Transformers, 2019, arXiv 1807.03819, with Graves's halting per
token: the state of a halted token is copied, and other tokens still attend to it. In evaluation halted tokens are not
computed: their keys and values are kept, running tokens are gathered from the whole batch, and rows without running
tokens are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.exits.ponder import EPSILON, Pondered, check_limits, halt
from shoestring.core.errors import Mistake


class HaltingState(NamedTuple):
    """Per token: its state, the output so far, halting probability, remainder and steps."""

    state: Tensor
    mean: Tensor
    total: Tensor
    remainder: Tensor
    steps: Tensor


class AdaptiveTokens(nn.Module):
    """Maps tokens (rows, tokens, width), with `padding` (rows, tokens, True for padding), to a Pondered of the same
    shape."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int | None = None,
        max_steps: int = 8,
        epsilon: float = EPSILON,
        bias: float = 1.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise Mistake(f"width={width} and heads={heads}: heads share the width, so it must be a multiple of them")
        check_limits(max_steps, epsilon)
        hidden = hidden or 4 * width
        self.query, self.key_value, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.work = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.step_embedding = nn.Parameter(0.02 * torch.randn(max_steps, width))
        self.halting = nn.Linear(width, 1)
        nn.init.constant_(self.halting.bias, bias)
        self.heads, self.max_steps, self.epsilon = heads, max_steps, epsilon

    def forward(self, x: Tensor, padding: Tensor | None = None, compact: bool | None = None) -> Pondered:
        """`compact`: compute only running tokens; by default in evaluation."""
        rows, tokens, _ = x.shape
        real = torch.ones(rows, tokens, dtype=torch.bool, device=x.device) if padding is None else ~padding
        run = self.compute_compact if (not self.training if compact is None else compact) else self.compute_masked
        found = run(x, real)
        steps = found.steps
        ponder = ((steps + found.remainder) * real).sum(1) / real.sum(1).clamp(min=1)
        return Pondered(found.mean, ponder, steps)

    def initial_state(self, x: Tensor) -> HaltingState:
        empty = x.new_zeros(x.shape[:2])
        return HaltingState(x, torch.zeros_like(x), empty, empty, torch.zeros_like(empty, dtype=torch.long))

    def attention(self, normed: Tensor, keys: Tensor, values: Tensor, real: Tensor) -> Tensor:
        """Attention of (rows, some tokens, width) to all real tokens of their row."""
        asks = self.query(normed).unflatten(2, (self.heads, -1)).transpose(1, 2)
        mask = (
            real[:, None, None, :] | ~real.any(1)[:, None, None, None]
        )  # a row of only padding attends to itself; the result is unused
        found = nn.functional.scaled_dot_product_attention(asks, keys, values, attn_mask=mask)
        answer: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return answer

    def split(self, key_values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = key_values.unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return keys, values

    def compute_masked(self, x: Tensor, real: Tensor) -> HaltingState:
        """All tokens until the last one has halted, with weight 0 for halted ones."""
        at, running = self.initial_state(x), real
        for number in range(self.max_steps):
            mine = running[:, :, None]
            input = torch.where(mine, at.state + self.step_embedding[number], at.state)
            normed = self.first_norm(input)
            middle = input + self.attention(normed, *self.split(self.key_value(normed)), real)
            state = torch.where(mine, middle + self.work(self.second_norm(middle)), at.state)
            found = halt(
                torch.sigmoid(self.halting(state))[:, :, 0], at.total, number == self.max_steps - 1, self.epsilon
            )
            mean = at.mean + (found.weight * running)[:, :, None] * state
            at = HaltingState(
                state,
                mean,
                torch.where(running, found.total, at.total),
                at.remainder + found.remainder * running,
                at.steps + running,
            )
            running = running & ~found.ends
            if not bool(running.any()):
                break
        return at

    def compute_compact(self, x: Tensor, real: Tensor) -> HaltingState:
        """The same, computing only running tokens, gathered from all rows."""
        rows, tokens, _ = x.shape
        at, running = self.initial_state(x), real
        cache = self.key_value(self.first_norm(x))  # includes halted tokens, and padding, which is masked
        for number in range(self.max_steps):
            chosen = running.flatten().nonzero()[:, 0]
            if not len(chosen):
                break
            input = at.state.flatten(0, 1)[chosen] + self.step_embedding[number]
            normed = self.first_norm(input)
            now = cache.flatten(0, 1).index_copy(0, chosen, self.key_value(normed)).view(rows, tokens, -1)
            middle = input + self.attend_running(normed, now, real, running)
            state = middle + self.work(self.second_norm(middle))
            found = halt(
                torch.sigmoid(self.halting(state))[:, 0],
                at.total.flatten()[chosen],
                number == self.max_steps - 1,
                self.epsilon,
            )
            at = HaltingState(
                at.state.flatten(0, 1).index_copy(0, chosen, state).view_as(x),
                at.mean.flatten(0, 1).index_add(0, chosen, found.weight[:, None] * state).view_as(x),
                at.total.flatten().index_copy(0, chosen, found.total).view(rows, tokens),
                at.remainder.flatten().index_add(0, chosen, found.remainder).view(rows, tokens),
                at.steps + running,
            )
            over = chosen[found.ends]
            cache = (
                cache.flatten(0, 1)
                .index_copy(0, over, self.key_value(self.first_norm(state[found.ends])))
                .view(rows, tokens, -1)
            )
            running = running.flatten().index_fill(0, over, False).view(rows, tokens)
        return at

    def attend_running(self, normed: Tensor, key_values: Tensor, real: Tensor, running: Tensor) -> Tensor:
        """Attention of running tokens (gathered) in their rows; rows without one are left out, and queries are padded
        to the largest number per row."""
        here = running.any(1).nonzero()[:, 0]
        counts = running[here].sum(1)
        places = torch.arange(int(counts.max()), device=normed.device) < counts[:, None]  # (rows left, most queries)
        asking = normed.new_zeros(len(here), places.shape[1], normed.shape[1])
        asking[places] = normed
        return self.attention(asking, *self.split(key_values[here]), real[here])[places]
