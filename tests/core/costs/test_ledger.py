"""Blocks as rows and as columns: the same bits, and no rows that nobody asked for."""

from __future__ import annotations

import numpy as np

from shoestring.core.costs.ledger import Block, Blocks, Ledger
from shoestring.core.costs.ledger_parts import StandingBytes, UpdateCost, Workers
from shoestring.core.exactness import Exactness
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.room import combinations

ROWS = tuple(
    Block(
        f"block {number}",
        kept=0.1 * number + 3,
        output=1.0,
        rise=4.7,
        spike=2.3,
        gradient=0.7 * number,
        forward=0.1 * number,
        backward=0.3,
    )
    for number in range(9)
)


def test_changed_columns_are_the_rows_with_these_numbers() -> None:
    blocks = Blocks(ROWS)
    changed = blocks.with_changes(spike=blocks.column("spike") + 2 * blocks.column("gradient"))
    assert changed == tuple(row.with_changes(spike=row.spike + 2 * row.gradient) for row in ROWS)
    assert blocks == ROWS


def test_sums_and_the_timeline_have_the_bits_of_going_through_the_rows() -> None:
    ledger = Ledger(ROWS, standing=StandingBytes(parameters=0.3), update=UpdateCost(rise=0.2), in_flight=3.0)
    assert ledger.columns.total("forward", "backward") == sum(row.forward + row.backward for row in ROWS)
    alive, tops = 0.3 + 2.0 * sum(row.kept for row in ROWS), []
    for row in ROWS:
        tops.append(alive + row.rise)
        alive += row.kept
    for row in reversed(ROWS):
        tops.append(alive + row.spike)
        alive += row.gradient - row.kept
    assert ledger.tops()[0].tolist() == [*tops, alive + 0.2]


def test_a_ranking_makes_no_rows_for_candidates_that_only_differ_in_columns() -> None:
    workers = Workers(world=4, per_byte_sent=1e-9, samples=8, own=2)
    ledger = Ledger(ROWS, tuple(Block(row.name, gradient=row.gradient) for row in ROWS), batch=2, workers=workers)
    found = list(combinations(ledger, CATALOGUE, Exactness.ROUNDING))
    by_columns = [one.cost.columns for one in found if one.cost.columns.changes]
    assert len(by_columns) > 100
    assert not [blocks for blocks in by_columns if "rows" in vars(blocks)]
    assert all(np.isfinite(list(one.known.values())).all() for one in found)
