"""Train heads of exits towards a model's own outputs: the model runs once on every batch, and stays as it is.

loss = sum_k T^2 KL( softmax(end / T) || softmax(exit_k / T) )          T = 2, no labels are read
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.exits.blocks import chain_of
from shoestring.compression.exits.confidence import check_logits
from shoestring.compression.exits.early_exit import EarlyExitModel, Head
from shoestring.compression.exits.exit_job import divergence, usual_head
from shoestring.compression.exits.rows import hidden_state, logits_of
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.running import random_state

RATE = 3e-3  # learning rate of Adam for the heads
TEMPERATURE = 2.0

Forward = Callable[[nn.Module, Batch], Any]


def trained_heads(
    model: nn.Module, batches: Sequence[Batch], forward: Forward, after: Sequence[int], steps: int
) -> dict[int, Head]:
    """A trained head after each of these numbers of blocks."""
    with random_state.fork_rng():
        random_state.seed(0)
        heads: dict[int, Head] = {}
        lessons = [lesson(model, batch, forward, after, heads) for batch in batches]
        optimizer = torch.optim.Adam([weight for head in heads.values() for weight in head.parameters()], lr=RATE)
        with torch.enable_grad():
            for step in range(steps):
                pooled, target = lessons[step % len(lessons)]
                optimizer.zero_grad()
                sum(
                    (divergence(heads[number].classified(one), target, TEMPERATURE) for number, one in pooled.items()),
                    torch.zeros(()),
                ).backward()
                optimizer.step()
    return heads


@torch.no_grad()
def lesson(
    model: nn.Module, batch: Batch, forward: Forward, after: Sequence[int], heads: dict[int, Head]
) -> tuple[dict[int, Tensor], Tensor]:
    """What each head reads of a batch, and the model's logits. Heads that are not there yet are made."""
    blocks = list(chain_of(model).values())
    hidden: dict[int, Tensor] = {}

    def noting(number: int) -> Callable[..., None]:
        return lambda module, given, output: hidden.__setitem__(number, hidden_state(output))

    handles = [blocks[number - 1].register_forward_hook(noting(number)) for number in after]
    try:
        logits = check_logits(logits_of(forward(model, batch)), "the model").detach()
    finally:
        for handle in handles:
            handle.remove()
    if len(hidden) < len(after):
        raise Mistake(f"the model's forward calls only some of its blocks ({sorted(hidden)} of {tuple(after)})")
    for number in after:
        if number not in heads:
            heads[number] = usual_head(hidden[number].shape, logits.shape[1])
    return {number: heads[number].pooled(hidden[number]).clone() for number in after}, logits.clone()


def with_heads(
    model: nn.Module, heads: dict[int, Head], thresholds: Sequence[float] | None, measure: str
) -> EarlyExitModel:
    """A copy of the model with copies of the heads whose exits are on."""
    kept = (
        list(heads) if thresholds is None else [n for n, one in zip(heads, thresholds, strict=True) if one < torch.inf]
    )
    on = None if thresholds is None else [one for one in thresholds if one < torch.inf]
    return EarlyExitModel(
        copy.deepcopy(model), {number: copy.deepcopy(heads[number]) for number in kept}, on, measure
    ).eval()
