"""The three promises, written once for every technique of the catalogue and every allowed pair."""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.hardware import Hardware
from shoestring.core.ledger import Ledger
from shoestring.core.run import Run, brought_home
from shoestring.core.technique import Exactness, Technique, choices, exactness, in_order, refusal, total_cost
from shoestring.loop import steps
from shoestring.measure.timeline import peak
from shoestring.memory.checkpoint import Checkpoint
from shoestring.planning.catalogue import CATALOGUE
from shoestring.planning.conflicts import conflict
from shoestring.planning.planner import Planner
from shoestring.planning.rehearse import prepared, rehearse, tracked
from tests.models import job, seeded

STEPS = 10
TOLERANCE = 1e-4   # of an exact technique that sums in another order, after ten steps of SGD
ROUNDED = 0.05     # of 16 bits, relative to the largest weight, after ten steps of SGD


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@cache
def ledger(name: str) -> Ledger:
    found = Planner(job(name, optimizer=sgd), Hardware(dtypes={"bf16": "", "fp16": ""}), inexact=True).ledger()
    return replace(found, traits=found.traits | {"own process"})


def settings(name: str) -> list[Technique]:
    """Of every technique, the first setting worth trying; of Checkpoint, the last too, which is a nested schedule."""
    found: list[Technique] = []
    for kind in CATALOGUE:
        usable = [one for one in choices(kind, ledger(name)) if not refusal(one, ledger(name))]
        found += dict.fromkeys([*usable[:1], *(usable[-1:] if kind is Checkpoint else ())])
    return found


def plans(name: str) -> list[tuple[Technique, ...]]:
    single = settings(name)
    pairs = [in_order(pair) for pair in combinations(single, 2) if not conflict(pair)]
    return [(one,) for one in single] + pairs


@cache
def plain_weights(name: str) -> Tensor:
    return weights_after(name, ())


def weights_after(name: str, techniques: tuple[Technique, ...]) -> Tensor:
    made = job(name, optimizer=sgd)
    model = seeded(made)
    run = prepared(made, techniques, model)
    for _ in steps(run, islice(made.batches(), STEPS)):
        pass
    brought_home(run)
    return nn.utils.parameters_to_vector(value.float() for value in model.state_dict().values()).detach()


@pytest.mark.parametrize("name", ["chain", "dropout chain", "u-net"])
def test_every_technique_and_every_allowed_pair_keeps_to_what_it_states(name: str) -> None:
    plain = plain_weights(name)
    for plan in plans(name):
        level = max(exactness(technique, ledger(name)) for technique in plan)
        after = weights_after(name, plan)
        if level is Exactness.BITS:
            assert torch.equal(after, plain), plan
        elif level is Exactness.ROUNDING:
            assert (after - plain).abs().max() <= TOLERANCE, plan
        elif level is Exactness.CHANGED and not any(type(one).__name__ == "Accumulate" for one in plan) and name == "chain":
            assert (after - plain).abs().max() <= ROUNDED * plain.abs().max(), plan


@pytest.mark.parametrize("name", ["chain", pytest.param("u-net", marks=pytest.mark.slow)])
def test_every_technique_and_every_allowed_pair_needs_the_bytes_and_operations_that_were_rehearsed(name: str) -> None:
    made = job(name, optimizer=sgd)
    for plan in plans(name):
        predicted, measured = rehearse(made, plan), tracked(made, plan, seeded(made))
        mixed = any(type(one).__name__ == "Precision" for one in plan)
        assert abs(peak(predicted).bytes - peak(measured).bytes) <= 0.001 * mixed * peak(measured).bytes, plan
        assert predicted.flops.total() == measured.flops.total(), plan
        assert predicted.moved == measured.moved, plan


def test_the_ledger_ranks_within_a_quarter_of_what_is_rehearsed() -> None:
    made = job("gpt2", optimizer=sgd)
    for plan in plans("gpt2"):
        by_ledger, rehearsed = total_cost(plan, ledger("gpt2")).peak, peak(rehearse(made, plan)).bytes
        assert abs(by_ledger - rehearsed) <= 0.25 * rehearsed, (plan, by_ledger, rehearsed)


@dataclass(frozen=True)
class Lazy:
    """A technique from outside: it skips every other update."""

    exact: ClassVar[bool] = False
    why: ClassVar[str] = "half the updates"

    def cost(self, now: Ledger) -> Ledger:
        return replace(now, update=now.update / 2)

    def apply(self, run: Run) -> Run:
        turns = iter(range(1_000_000))

        def update(now: Run) -> None:
            if next(turns) % 2 == 0:
                run.update(now)

        return replace(run, update=update)


def test_a_technique_from_outside_is_planned_and_trained_without_touching_the_loop() -> None:
    made = job("chain", optimizer=sgd)
    planner = Planner(made, Hardware(), catalogue=(*CATALOGUE, Lazy), inexact=True, wanted=(Lazy(),))
    assert planner.outcome(None, forced=(Lazy(),)).chosen.techniques == (Lazy(),)
    run = prepared(made, (Lazy(),), seeded(made))
    losses = [float(loss) for loss in steps(run, islice(made.batches(), 6))]
    assert losses[0] > losses[-1]
