"""The dynamic program: never slower, at equal peak, than any uniform cut; and its schedules cost what they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from shoestring.core.costs.ledger import Block, Ledger
from shoestring.training.memory.recompute import chain as program
from shoestring.training.memory.recompute.chain import LEVELS, best_schedules, recomputed_costs
from shoestring.training.memory.recompute.checkpoint import Checkpoint, ledger_schedule
from shoestring.training.memory.recompute.recompute import flat

blocks = st.lists(
    st.builds(
        lambda kept, share, rise, spike, forward, gradient: Block(
            "b",
            kept=kept,
            output=kept * share,
            rise=kept * (1 + rise),
            spike=kept * spike,
            forward=forward,
            backward=2 * forward,
            gradient=gradient,
        ),
        st.integers(10, 1000).map(float),
        st.floats(0.01, 0.5),
        st.floats(0, 0.3),
        st.floats(0, 0.5),
        st.floats(0.1, 10),
        st.integers(0, 100).map(float),
    ),
    min_size=2,
    max_size=9,
).map(tuple)


def after(chain: tuple[Block, ...], checkpoint: Checkpoint) -> Ledger:
    return Ledger(recomputed_costs(chain, ledger_schedule(chain, checkpoint.numbers(len(chain)))))


@settings(max_examples=60, deadline=None)
@given(blocks)
def test_with_the_memory_of_a_uniform_cut_the_program_alone_is_never_slower(chain: tuple[Block, ...]) -> None:
    carried = max(
        block.output for block in chain
    )  # the program counts the input a forgotten block stands on; a cut's ledger does not
    for every in range(1, len(chain) + 1):
        uniform = after(chain, Checkpoint(every=every))
        limit = (uniform.peak + carried) * (1 + (len(chain) + 2) / LEVELS)  # it rounds every block up by a level
        (schedule,) = best_schedules(chain, [limit])
        assert Ledger(recomputed_costs(chain, schedule)).seconds <= uniform.seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(blocks, st.floats(0.3, 1.0))
@example(
    tuple(
        Block("b", kept=10.0, output=5.0, rise=10.0, forward=1.0, backward=2.0, gradient=size) for size in (11.0, 9.0)
    ),
    0.96875,
)
def test_a_schedule_stays_within_the_limit_it_was_made_for(chain: tuple[Block, ...], share: float) -> None:
    limit = share * Ledger(chain).peak
    for schedule in best_schedules(chain, [limit]):
        assert flat(schedule) == list(range(len(chain)))
        assert Ledger(recomputed_costs(chain, schedule)).peak <= limit * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(blocks)
def test_with_plain_memory_nothing_is_forgotten(chain: tuple[Block, ...]) -> None:
    enough = Ledger(chain).peak * (1 + (len(chain) + 2) / LEVELS)  # it rounds every block up by a level
    assert best_schedules(chain, [enough]) == [tuple(range(len(chain)))]


def test_on_an_uneven_chain_the_program_beats_every_uniform_cut() -> None:
    sizes = (1000, 50, 50, 50, 800, 50, 50, 900)
    chain = tuple(
        Block(
            str(k),
            kept=float(size),
            output=10.0,
            rise=float(size),
            spike=20.0,
            forward=1.0 if size < 100 else 4.0,
            backward=2.0,
        )
        for k, size in enumerate(sizes)
    )
    for every in range(1, 5):
        uniform = after(chain, Checkpoint(every=every))
        found = [
            Ledger(recomputed_costs(chain, one))
            for one in best_schedules(chain, [uniform.peak * k / 40 for k in range(1, 41)])
        ]
        assert min(one.seconds for one in found if one.peak <= uniform.peak) < uniform.seconds


def repeating(first: Block, sizes: list[int], others: tuple[Block, ...]) -> tuple[Block, ...]:
    """Blocks that cost the same, as many as each size says, with another one after each; gradients stand elsewhere."""
    return tuple(
        replace(one, gradient=0.0)
        for place, size in enumerate(sizes)
        for one in (*[first] * size, others[place % len(others)])
    )


@settings(max_examples=60, deadline=None)
@given(blocks, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
def test_blocks_that_repeat_get_the_schedules_of_a_program_that_does_not_look_for_them(
    some: tuple[Block, ...], sizes: list[int], outside: bool
) -> None:
    chain = repeating(some[0], sizes, tuple(replace(one, inside=not outside) for one in some[1:]))
    most = Ledger(chain).peak
    limits = [most * share / 12 for share in range(1, 13)]
    quick = best_schedules(chain, limits)
    with MonkeyPatch.context() as patch:
        patch.setattr(program, "first_repeats", lambda blocks: list(range(len(blocks))))
        assert quick == best_schedules(chain, limits)


@settings(max_examples=60, deadline=None)
@given(blocks, st.lists(st.integers(1, 6), max_size=3), st.booleans(), st.integers(0, 3))
def test_bounds_on_memory_leave_the_schedules_of_a_program_without_them(
    some: tuple[Block, ...], sizes: list[int], gradients: bool, free: int
) -> None:
    chain = repeating(some[0], sizes, some[1:]) if sizes else some
    chain = tuple(
        replace(one, gradient=some[0].gradient * gradients, forward=0.0 if place < free else one.forward)
        for place, one in enumerate(chain)
    )
    most = Ledger(chain).peak
    limits = [most * share / 12 for share in range(1, 13)]
    quick = best_schedules(chain, limits)
    with MonkeyPatch.context() as patch:
        patch.setattr(program, "first_repeats", lambda blocks: list(range(len(blocks))))
        patch.setattr(program, "always_slower", lambda blocks: False)
        patch.setattr(program, "least_levels", lambda kept, outputs, lowest: [0] * len(kept))
        assert quick == best_schedules(chain, limits)


def test_of_equal_blocks_little_is_computed() -> None:
    def looked_up(chain: tuple[Block, ...]) -> int:
        """Numbers of bytes that the program turns into levels: one for every block that it costs up to every t."""
        count = 0

        def units(size: Any) -> Any:
            nonlocal count
            count += np.size(size)
            return np.ceil(np.asarray(size) / 10).astype(np.int16)

        program.solve_parts(chain, units, [10] * len(chain), [1] * len(chain))
        return count

    equal = tuple(
        Block(str(number), kept=100.0, output=10.0, rise=120.0, spike=30.0, forward=1.0, backward=2.0)
        for number in range(40)
    )
    uneven = tuple(replace(block, forward=1.0 + number / 100) for number, block in enumerate(equal))
    assert looked_up(equal) < looked_up(uneven) / 5
    apart = tuple(replace(block, inside=number % 2 == 1) for number, block in enumerate(uneven))
    assert looked_up(apart) < looked_up(uneven) / 10, "a segment ends where something runs in between"
