"""What robust aggregation rules share: they need all rows of a round at once, and enough of them.

With too few rows (devices dropped out or were rejected) a rule makes no update: the weights stay as they are, the
combined weight is 0, and the server's state counts such rounds under "<rule>.skipped". Norm-layer statistics become the
median over devices, because a rule that filters weights does not notice forged statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.federated.model.combined_statistics import median_statistics
from shoestring.federated.round import Combine, Combined, Round, ServerState, Updates
from shoestring.federated.technique import RoundCost

BLOCK = 1 << 22  # numbers that a rule processes together: some columns of all rows

Rule = Callable[[Tensor], tuple[Tensor, int]]  # (k, size) -> one row (size), and how many rows are in it


def with_robust_rule(round: Round, name: str, rule: Rule, too_few: Callable[[int], str]) -> Round:
    """The round with a robust rule; `too_few` says why a number of rows does not suffice, empty if it does."""
    skipped = f"{name}.skipped"

    def initial(server: ServerState) -> ServerState:
        return with_state(round.initial(server), {skipped: torch.zeros((), dtype=torch.int64)})

    return round.with_(combine=combine_with(rule, too_few, skipped), initial=initial, settle=median_statistics)


def combine_with(rule: Rule, too_few: Callable[[int], str], skipped: str) -> Combine:
    def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
        rows = stack_rows(arriving, server)
        if not len(rows) or too_few(len(rows)):
            return Combined(torch.zeros_like(server.weights), {skipped: server.state[skipped] + 1})
        update, count = rule(rows)
        return Combined(update, weight=float(count))

    return combine


def stack_rows(arriving: Iterable[Updates], server: ServerState) -> Tensor:
    """All rows (k, size), in the order of arrival."""
    parts = [updates.rows for updates in arriving]
    return torch.cat(parts) if parts else server.weights.new_zeros((0, len(server.weights)))


def column_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Split a matrix into blocks of columns, so that sorting needs little extra memory."""
    width = max(BLOCK // len(rows), 1)
    return (rows[:, begin : begin + width] for begin in range(0, rows.shape[1], width))


def with_state(server: ServerState, more: dict[str, Tensor]) -> ServerState:
    return replace(server, state={**server.state, **more})


def privacy_refusal(cost: RoundCost) -> str:
    """Why a robust rule can't be used with an epsilon; empty if none was asked for."""
    if not cost.delta:
        return ""
    return "epsilon is computed for a mean of clipped updates, and this rule makes none: leave out the rule, or --epsilon and --delta"
