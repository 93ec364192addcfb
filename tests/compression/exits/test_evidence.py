"""Costs of the parts of a model with exits, by a clock that counts work: every module takes a fixed time and some more for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.compression.exits import CascadeModel, EarlyExitModel, PartSeconds, gather_evidence, seconds_by_part
from tests.compression.exits.toys import chain, heads_of

ROWS = 32
WORK = tuple[float, float]  # seconds of a call however many rows it has, and of each row


class WorkClock:
    """Stands still but for the work of these modules."""

    def __init__(self, work: Mapping[nn.Module, WORK]) -> None:
        self.now = 0.0
        for module, (fixed, each) in work.items():
            module.register_forward_hook(self.counting(fixed, each))

    def counting(self, fixed: float, each: float) -> Any:
        def count(module: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            self.now += fixed + each * len(output)

        return count

    def __call__(self) -> float:
        return self.now


def costs_of(model: EarlyExitModel | CascadeModel, work: Mapping[nn.Module, WORK]) -> PartSeconds:
    return seconds_by_part(model, (torch.randn(ROWS, 5),), rounds=2, clock=WorkClock(work))


def test_each_part_and_each_head_costs_its_own_work() -> None:
    early = EarlyExitModel(chain(), heads_of((1, 3), 8, 3)).eval()
    stem, *blocks, tail = early.model
    first, second = early.heads.values()
    costs = costs_of(
        early,
        {
            stem: (1.0, 0.5),
            blocks[0]: (2.0, 1.0),
            blocks[1]: (0.0, 3.0),
            blocks[2]: (4.0, 0.0),
            blocks[3]: (8.0, 0.25),
            tail: (0.0, 0.125),
            first: (16.0, 0.5),
            second: (32.0, 2.0),
        },
    )
    assert costs.parts == pytest.approx((1.5, 3.0, 0.375)) and costs.heads == pytest.approx((0.5, 2.0))
    assert costs.fixed == pytest.approx((3.0 / ROWS, 4.0 / ROWS, 8.0 / ROWS)) and costs.batch == ROWS
    assert costs.leaving == pytest.approx((16.0 + 32.0) / ROWS)


def test_a_short_part_beside_heads_whose_time_varies_keeps_its_own() -> None:
    """Each call of a head takes longer than the one before, as on a machine that slows down: no difference of two calls is left over."""
    early = EarlyExitModel(chain(), heads_of((1, 3), 8, 3)).eval()
    work = WorkClock({early.model[0]: (0.0, 1.0), early.model[-1]: (0.0, 0.25)})
    calls = 0

    def later(*_: Any) -> None:
        nonlocal calls
        calls += 1
        work.now += float(calls)

    for head in early.heads.values():
        head.register_forward_hook(later)
    assert seconds_by_part(early, (torch.randn(ROWS, 5),), rounds=2, clock=work).parts[-1] == pytest.approx(0.25)


def test_exits_that_share_a_head_pay_for_it_each() -> None:
    heads = heads_of((1,), 8, 3)
    early = EarlyExitModel(chain(), {1: heads[1], 3: heads[1]}).eval()
    assert costs_of(early, {early.model[1]: (0.0, 1.0), heads[1]: (0.0, 2.0)}).heads == pytest.approx((2.0, 2.0))


def test_the_models_of_a_cascade_cost_their_own_work() -> None:
    cascade = CascadeModel([chain(depth=2), chain(depth=3)]).eval()
    costs = costs_of(cascade, {cascade.models[0]: (4.0, 1.0), cascade.models[1]: (0.0, 3.0)})
    assert costs.parts == pytest.approx((1.0, 3.0)) and costs.heads == pytest.approx((0.0,))
    assert costs.fixed == pytest.approx((4.0 / ROWS, 0.0))


def test_what_an_answer_takes_beyond_its_parts_is_the_cost_of_leaving() -> None:
    early = EarlyExitModel(chain(), heads_of((2,), 8, 3)).eval()
    work = WorkClock({early.model[0]: (0.0, 1.0)})
    answer = early.answer

    def slower(*args: Any, **kwargs: Any) -> Any:
        work.now += 64.0
        return answer(*args, **kwargs)

    early.answer = slower  # type: ignore[method-assign]
    assert seconds_by_part(early, (torch.randn(ROWS, 5),), rounds=2, clock=work).leaving == pytest.approx(64.0 / ROWS)


def test_a_machine_that_slows_down_makes_no_exit_dearer_than_the_model() -> None:
    """What is compared was timed in one round: by rounds that take longer and longer, leaving still costs nothing."""
    early = EarlyExitModel(chain(), heads_of((2,), 8, 3)).eval()
    work = WorkClock({early.model[0]: (0.0, 1.0)})
    answer, slowness = early.all_exits, 1.0

    def slower(*args: Any, **kwargs: Any) -> Any:
        nonlocal slowness
        if len(args[0]) == ROWS // 4:  # a new round begins
            slowness *= 1.5
        return answer(*args, **kwargs)

    def slowed(*_: Any) -> None:
        work.now += (slowness - 1) * ROWS

    early.all_exits = slower  # type: ignore[method-assign]
    early.model[0].register_forward_hook(slowed)
    assert seconds_by_part(early, (torch.randn(ROWS, 5),), rounds=9, clock=work).leaving == pytest.approx(0.0)


def test_seconds_of_this_machine_are_costs_that_evidence_takes() -> None:
    early = EarlyExitModel(chain(), heads_of((1, 3), 8, 3)).eval()
    batch = (torch.randn(ROWS, 5),)
    evidence = gather_evidence(early, [batch], seconds_by_part(early, batch, rounds=2))
    assert (len(evidence.parts), len(evidence.heads), len(evidence.fixed), evidence.batch) == (3, 2, 3, ROWS)
