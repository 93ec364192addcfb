"""What robust rules share: they need all rows of a round at once, and enough of them.

A rule that finds too few (devices dropped out or were rejected; nobody answered) makes no update: the weights stay as they are, the
combined weight is 0, and the rounds in which that happened are counted in the server's state under "<rule>.skipped". Statistics of norm
layers become the median of devices under all of them: a rule for weights says nothing of who lies about those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.federated.combined_statistics import median_statistics
from shoestring.federated.round import Combine, Combined, Round, ServerState, Updates
from shoestring.federated.technique import RoundCost

BLOCK = 1 << 22  # numbers that a rule looks at together: a few columns of all rows

Rule = Callable[[Tensor], tuple[Tensor, int]]  # (k, size) -> one row (size), and how many rows are in it


def robust(round: Round, name: str, rule: Rule, too_few: Callable[[int], str]) -> Round:
    """The round with a rule of all rows; `too_few`: why so many rows do not suffice, empty if they do."""
    skipped = f"{name}.skipped"

    def initial(server: ServerState) -> ServerState:
        return with_state(round.initial(server), {skipped: torch.zeros((), dtype=torch.int64)})

    return round.with_(combine=combined_by(rule, too_few, skipped), initial=initial, settle=median_statistics)


def combined_by(rule: Rule, too_few: Callable[[int], str], skipped: str) -> Combine:
    def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
        rows = gathered(arriving, server)
        if not len(rows) or too_few(len(rows)):
            return Combined(torch.zeros_like(server.weights), {skipped: server.state[skipped] + 1})
        update, count = rule(rows)
        return Combined(update, weight=float(count))

    return combine


def gathered(arriving: Iterable[Updates], server: ServerState) -> Tensor:
    """All rows (k, size), in the order in which they come."""
    parts = [updates.rows for updates in arriving]
    return torch.cat(parts) if parts else server.weights.new_zeros((0, len(server.weights)))


def blocks(rows: Tensor) -> Iterator[Tensor]:
    """A matrix as blocks of columns, so that a sort of all rows needs little memory beside them."""
    width = max(BLOCK // len(rows), 1)
    return (rows[:, begin : begin + width] for begin in range(0, rows.shape[1], width))


def with_state(server: ServerState, more: dict[str, Tensor]) -> ServerState:
    return replace(server, state={**server.state, **more})


def not_private(cost: RoundCost) -> str:
    """Why a rule that is no mean of clipped updates can't be used where an epsilon is asked for; empty if none is."""
    if not cost.delta:
        return ""
    return (
        "an epsilon is asked for, and it is calculated for a mean of clipped updates, which this rule is not: leave out the rule or "
        "--epsilon and --delta"
    )
