"""Validation, written once for every technique: it finds what plain training does, changes nothing, and its memory is in the plan."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.running.run_weights import bring_home
from shoestring.core.technique import total_cost
from shoestring.data.feed import Feed
from shoestring.measure.timeline import blocks_of, peak, validation
from shoestring.measure.tracker import VALIDATE, Log, Moment
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.validation import run_validation
from tests.awkward import AWKWARD
from tests.models import job, seeded
from tests.training.planning.test_awkward import QUICK, reset
from tests.training.test_promises import TOLERANCE, ledger, plans, sgd

STEPS = 3


def accuracy(output: Any, batch: Any) -> dict[str, Tensor]:
    return (
        {"hits": (output.argmax(1) == batch[1]).float().mean()}
        if isinstance(output, Tensor)
        else {"hits": output["loss"] < 3}
    )


def validating(made: Job, times: int = 1) -> Job:
    """The same job, held to four batches of other sizes; three of them larger than those it trains on."""
    (batch,) = islice(made.data(), 1)
    several = [made.pieces(batch, 2)[0], *(doubled(batch, more * times) for more in (2, 3, 2))]
    return replace(made, held_out=lambda: several, metrics=accuracy, goal="max hits")


def doubled(batch: Any, times: int) -> Any:
    values = batch.items() if isinstance(batch, dict) else enumerate(batch)
    made = {key: torch.cat([value.flip(0)] * times) for key, value in values}
    return made if isinstance(batch, dict) else tuple(made.values())


def trained(made: Job, techniques: tuple[Technique, ...], validates: bool) -> tuple[dict[str, float], Tensor]:
    """The metrics after a few steps, and the weights; with `validates`, it is done after every one of them."""
    run, found = build_run(made, techniques, seeded(made)), {}
    for number, _ in enumerate(steps(run, islice(Feed(made), STEPS)), 1):
        if validates or number == STEPS:
            found = run_validation(run, made)
    bring_home(run)
    return found, torch.cat([value.detach().float().reshape(-1) for value in run.model.state_dict().values()])


@cache
def plain(name: str) -> tuple[dict[str, float], Tensor]:
    return trained(validating(job(name, optimizer=sgd)), (), False)


@pytest.mark.parametrize("name", ["chain", "u-net", "dropout chain"])
def test_every_technique_is_validated_as_plain_training_is_and_trains_the_same_weights(name: str) -> None:
    made = validating(job(name, optimizer=sgd))
    assert set(plain(name)[0]) == {"loss", "hits"}
    for plan in plans(name):
        if len(plan) > 1:
            continue
        level = plan[0].exactness(ledger(name))
        (found, after), (_, without) = trained(made, plan, True), trained(made, plan, False)
        assert torch.equal(after, without), plan
        if level is Exactness.BITS:
            assert found == plain(name)[0], plan
        elif level is Exactness.ROUNDING:
            assert found == pytest.approx(plain(name)[0], abs=TOLERANCE), plan
        else:
            assert found["loss"] == pytest.approx(plain(name)[0]["loss"], rel=0.1), plan


ELSEWHERE = (
    "a counter outside of all blocks"  # a list in the user's file, which may as well be for results: it is left alone
)
TOLD = {
    "weights that the forward changes": "changes its weight .* in evaluation too",
    "second derivatives": "enable_grad",
    "a graph": "can't be counted",
}


@pytest.mark.parametrize("name", [name for name in AWKWARD if name != ELSEWHERE])
def test_awkward_models_are_as_if_nobody_had_validated_them(name: str) -> None:
    made = AWKWARD[name].job()
    made = replace(made, held_out=lambda: list(islice(made.data(), 2)))
    for plan in ((), QUICK[:1]):
        if name in TOLD:
            with pytest.raises(Mistake, match=TOLD[name]):
                awkward_weights(made, (), True)
            continue
        with suppress(Mistake):  # what the technique refuses: test_awkward
            without = awkward_weights(made, plan, False)
            assert torch.equal(awkward_weights(made, plan, True), without), plan


def awkward_weights(made: Job, plan: tuple[Technique, ...], validates: bool) -> Tensor:
    reset()
    run = build_run(made, plan, seeded(made))
    for _ in steps(run, islice(Feed(made), STEPS)):
        if validates:
            run_validation(run, made)
    values = [value.detach().to_dense().flatten() for value in run.model.state_dict().values()]
    return torch.cat(
        [torch.view_as_real(one).flatten().double() if one.is_complex() else one.double() for one in values]
    )


def moments(log: Log) -> list[Moment]:
    return [moment for _, moment in log.marks]


@pytest.mark.parametrize("name", ["chain", "u-net"])
def test_the_memory_of_a_validation_is_rehearsed_to_the_byte_under_every_technique(name: str) -> None:
    made = validating(job(name, optimizer=sgd))
    higher = 0
    for plan in plans(name):
        if len(plan) > 1:
            continue
        predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
        mixed = any(type(one).__name__ == "Precision" for one in plan)
        assert abs(peak(predicted).bytes - peak(measured).bytes) <= 0.001 * mixed * peak(measured).bytes, plan
        assert validation(predicted) and not predicted.unvalidated, plan
        without = rehearse(replace(made, held_out=None, metrics=None), plan)
        higher += peak(predicted).moment.phase == VALIDATE
        assert blocks_of(predicted) == blocks_of(without) and predicted.flops == without.flops, plan
        assert (predicted.moved, predicted.sent, predicted.draws) == (without.moved, without.sent, without.draws), plan
        assert mixed or moments(predicted)[: len(without.marks)] == moments(without), plan
    assert higher


def test_the_ledger_ranks_validation_within_a_quarter_of_what_is_rehearsed() -> None:
    made = validating(job("gpt2", optimizer=sgd), times=4)
    found = Planner(made, Hardware()).ledger()
    assert found.validation is not None and found.validation.seconds > 0
    higher = 0
    for plan in plans("gpt2"):
        if len(plan) == 1 and not plan[0].computes_in:
            by_ledger, rehearsed = total_cost(plan, found).peak, peak(rehearse(made, plan))
            higher += rehearsed.moment.phase == VALIDATE
            assert abs(by_ledger - rehearsed.bytes) <= 0.25 * rehearsed.bytes, (plan, by_ledger, rehearsed)
    assert higher


def planned(**more: Any) -> TrainingPlan:
    made = replace(validating(job("chain", optimizer=sgd), times=4), **more)
    return Planner(made, Hardware()).outcome(None, ()).chosen


def test_a_plan_tells_where_validation_is_its_peak_and_how_long_it_takes() -> None:
    plan, without = planned(metrics=None, goal="min loss"), planned(held_out=None, metrics=None)
    assert (
        plan.details.where.startswith("validation, ") and plan.predicted["peak_bytes"] > without.predicted["peak_bytes"]
    )
    assert any(name.startswith("validate ") for name, _ in plan.details.blocks)
    assert not any(name.startswith("validate") for name, _ in without.details.blocks)
    assert plan.predicted["validation_seconds"] > 0 and plan.predicted["training_seconds"] > 0
    assert plan.as_json()["validation_seconds"] > 0 == without.as_json()["validation_seconds"]
    assert (plan.predicted["flops"], plan.predicted["traffic_bytes"], plan.predicted["step_seconds"]) == (
        without.predicted["flops"],
        without.predicted["traffic_bytes"],
        without.predicted["step_seconds"],
    )


def test_what_of_a_validation_is_not_in_the_plan_is_told() -> None:
    looks = planned(metrics=lambda output, batch: {"hits": (output.argmax(1) == batch[1]).float().mean().item()})
    assert "validation is part of the tensors up to where fake ones could not run it (LooksAtValues" in looks.basis
    assert looks.details.where.startswith("validation, ")
    own = planned(held_out=None, metrics=None, validate=lambda model: {"hits": 1.0})
    assert "validation is not part of the tensors (validate=... may do anything" in own.basis


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"goal": "max f1"}, "validation gave loss, hits"),
        ({"held_out": lambda: iter(())}, "yield no batch"),
        ({"held_out": list}, "yield no batch"),
        ({"metrics": lambda output, batch: {"step": 1.0}}, "'step', which stands beside every metric"),
        ({"metrics": lambda output, batch: {"loss": 1.0}}, "'loss', which is the held-out loss"),
        ({"metrics": lambda output, batch: 0.5}, "gave a float"),
    ],
)
def test_what_is_wrong_in_a_validation_is_told_before_a_step_is_trained(more: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        planned(**more)
