"""The cost of a pipeline: what is computed by a bound or a formula is what playing the schedule gives."""

from __future__ import annotations

import pytest

from shoestring.core.costs.ledger import Block, Ledger
from shoestring.core.costs.ledger_parts import StandingBytes, UpdateCost, ValidationCost, Workers
from shoestring.training.pipeline.cost import Pipe, pipe_of
from shoestring.training.pipeline.settings import pareto_front

BACKWARDS = {"even": [2.0] * 12, "uneven": [1.0, 3.0, 2.0, 5.0, 0.5, 2.0, 4.0, 1.0, 1.0, 2.5, 0.0, 3.0]}
SETTINGS = [
    (schedule, stages, pieces, 2 if schedule == "interleaved" else 1)
    for schedule in ("naive", "gpipe", "1f1b", "zero-bubble", "interleaved")
    for stages, pieces in ((2, 2), (4, 8), (3, 16), (6, 3))
]


def ledger(backwards: list[float], hides: bool = True) -> Ledger:
    blocks = [
        Block(f"{number}", kept=10 + number, rise=30, spike=5, gradient=8, output=3, forward=1.0, backward=backward)
        for number, backward in enumerate(backwards)
    ]
    outside = Block("(start)", False, kept=4, rise=5, forward=0.25, backward=0.5)
    return Ledger(
        (outside, *blocks),
        batch=16,
        standing=StandingBytes(parameters=96, optimizer=192, inputs=7),
        update=UpdateCost(rise=40),
        workers=Workers(12, 0.01, 0.001, hides, samples=192, own=16),
        validation=ValidationCost(rise=20),
    )


def pipes(backwards: list[float], hides: bool = True) -> list[Pipe]:
    whole = ledger(backwards, hides)
    return [pipe_of(whole, stages, pieces, schedule, chunks) for schedule, stages, pieces, chunks in SETTINGS]


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("backwards", BACKWARDS.values(), ids=BACKWARDS.keys())
def test_no_schedule_is_faster_than_its_bound_and_a_peak_is_that_of_the_stage(
    backwards: list[float], hides: bool
) -> None:
    for pipe in pipes(backwards, hides):
        assert pipe.least_step <= pipe.step, (pipe.schedule, pipe.stages, pipe.pieces)
        for worker in range(pipe.stages):
            assert pipe.peak(worker) == pipe.stage(worker).peak, (pipe.schedule, worker)


def test_in_equal_stages_the_bound_is_the_schedule_itself() -> None:
    for schedule in ("gpipe", "1f1b"):
        even = Ledger([Block(f"{number}", forward=1.0, backward=2.0) for number in range(8)], batch=32)
        pipe = pipe_of(even, 4, 32, schedule)
        assert pipe.least_step == pytest.approx(pipe.step, rel=1e-8), schedule


@pytest.mark.parametrize("backwards", BACKWARDS.values(), ids=BACKWARDS.keys())
def test_schedules_are_played_for_contenders_alone_and_the_same_pipelines_are_left(backwards: list[float]) -> None:
    each = pipes(backwards)
    front = list(pareto_front(each))
    assert sum("step" in vars(pipe) for pipe in each) <= len(each) // 2, "the others are beaten by their bounds"
    slowly, least = [], float("inf")
    for pipe in sorted(each, key=lambda pipe: pipe.step):
        if (peak := max(pipe.stage(worker).peak for worker in range(pipe.stages))) < least:
            least = peak
            slowly.append(pipe)
    assert [id(pipe) for pipe in front] == [id(pipe) for pipe in slowly]
