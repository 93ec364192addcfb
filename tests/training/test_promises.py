"""The three promises, written once for every technique of the catalogue and every allowed pair."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, islice
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, split
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.exactness import Exactness
from shoestring.core.running.run import Run
from shoestring.core.running.run_weights import bring_home
from shoestring.core.technique import drift, in_order, total_cost
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.conflicts import conflict
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.ledgers import of_world, with_traits
from tests.models import job, seeded

STEPS = 10
TOLERANCE = 1e-4  # of an exact technique that sums in another order, after ten steps of SGD
SEEDS = 12  # that a mean is over
INTERVAL = 3.0  # standard errors that two means of the same distribution may be apart
BESIDE = 0.01  # of the loss, that a changed technique beside one that draws may add to that


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@cache
def ledger(name: str) -> Ledger:
    found = Planner(job(name, optimizer=sgd), Hardware(dtypes={"bf16": "", "fp16": ""}), inexact=True).ledger()
    return with_traits(found, "own process")


def settings(name: str) -> list[Technique]:
    """Of every technique, the first setting worth trying; of Checkpoint, the last too, which is a nested schedule."""
    found: list[Technique] = []
    for kind in CATALOGUE:
        usable = [one for one in kind.choices(ledger(name)) if not one.refusal(ledger(name))]
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
    run = build_run(made, techniques, model)
    for _ in steps(run, islice(Feed(made), STEPS)):
        pass
    bring_home(run)
    return torch.cat([value.detach().float().reshape(-1) for value in model.state_dict().values()])


def drifted(name: str, after: Tensor) -> float:
    """How far weights are from those of plain training, as a share of the way that it went."""
    made = job(name, optimizer=sgd)
    model = seeded(made)
    trained = torch.cat(
        [
            torch.full([value.numel()], key in dict(model.named_parameters()))
            for key, value in model.state_dict().items()
        ]
    )
    begun = torch.cat([value.detach().float().reshape(-1) for value in model.state_dict().values()])
    plain = plain_weights(name)
    return float((after - plain)[trained].norm() / (plain - begun)[trained].norm())


@pytest.mark.parametrize(
    "name", ["chain", "dropout chain", "u-net", pytest.param("frozen bottom", marks=pytest.mark.slow)]
)
def test_every_technique_and_every_allowed_pair_keeps_to_what_it_states(name: str) -> None:
    plain, levels = plain_weights(name), Counter[Exactness]()
    for plan in plans(name):
        stated = {technique.exactness(ledger(name)) for technique in plan}
        levels[max(stated)] += 1
        if Exactness.DISTRIBUTION in stated:
            if len(plan) == 1:  # with others: below
                keeps_the_mean(name, plan)
            continue
        after = weights_after(name, plan)
        if max(stated) is Exactness.BITS:
            assert torch.equal(after, plain), plan
        elif max(stated) is Exactness.ROUNDING:
            assert (after - plain).abs().max() <= TOLERANCE, plan
        else:
            assert 0 < drifted(name, after) <= sum(drift(technique, ledger(name)) for technique in plan) < 10, plan
    assert {*levels} >= {
        Exactness.BITS,
        Exactness.ROUNDING,
        Exactness.CHANGED,
        *([Exactness.DISTRIBUTION] if name == "dropout chain" else []),
    }


@pytest.mark.slow
def test_every_allowed_pair_with_a_technique_that_draws_anew_keeps_the_mean() -> None:
    name = "dropout chain"
    pairs = [
        plan
        for plan in plans(name)
        if len(plan) > 1 and any(one.exactness(ledger(name)) is Exactness.DISTRIBUTION for one in plan)
    ]
    assert pairs
    for plan in pairs:
        keeps_the_mean(
            name, plan, BESIDE if any(one.exactness(ledger(name)) is Exactness.CHANGED for one in plan) else 0.0
        )


def losses_over_seeds(name: str, techniques: tuple[Technique, ...], first: int) -> Tensor:
    """The finished model's loss on its batch, without dropout, for different draws in training from the same weights."""
    made = job(name, optimizer=sgd)
    found = []
    for seed in range(first, first + SEEDS):
        model = seeded(made)
        torch.manual_seed(seed)
        run = build_run(made, techniques, model)
        for _ in steps(run, islice(Feed(made), STEPS)):
            pass
        bring_home(run)
        model.eval()
        batch = next(iter(Feed(made)))
        with torch.no_grad():
            found.append(float(made.loss(made.forward(model, batch), batch)))
    return torch.tensor(found, dtype=torch.float64)


@cache
def plain_losses(name: str) -> Tensor:
    return losses_over_seeds(name, (), 1000)


def apart(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """How far two means are apart, and the standard error of that."""
    return float((losses.mean() - others.mean()).abs()), float(
        (losses.var() / len(losses) + others.var() / len(others)).sqrt()
    )


def keeps_the_mean(name: str, plan: tuple[Technique, ...], beside: float = 0.0) -> None:
    """A technique that draws other numbers of the same distribution has the same mean loss over seeds as plain training."""
    found = losses_over_seeds(name, plan, 2000)
    off, error = apart(found, plain_losses(name))
    assert 0 < off <= INTERVAL * error + beside * float(plain_losses(name).mean()), plan
    assert 3 * error < float(plain_losses(name).mean()) / 10, "an interval that holds anything would say nothing"


def test_a_technique_that_draws_from_another_distribution_is_found_by_its_mean() -> None:
    """One that forgets to weigh its pieces by their share of the batch: a gradient of twice the length."""
    off, error = apart(losses_over_seeds("dropout chain", (Unweighed(),), 2000), plain_losses("dropout chain"))
    assert off > 3 * INTERVAL * error


@dataclass(frozen=True)
class Unweighed(Technique):
    exact: ClassVar[bool] = True
    why: ClassVar[str] = "wrong"

    def cost(self, now: Ledger) -> Ledger:
        return now

    def apply(self, run: Run) -> Run:
        def gradients(now: Run, batch: Batch) -> Tensor:
            return torch.stack([run.gradients(now, piece) for piece in split(batch, 2)]).mean()

        return replace(run, gradients=gradients)


def test_every_technique_that_can_change_what_is_trained_states_by_how_much() -> None:
    for traits in (frozenset[str](), frozenset({"mixes samples"})):
        now = with_traits(of_world(ledger("chain"), 2), *traits)
        for kind in CATALOGUE:
            settings = kind.choices(now) or (kind(),)  # some are only for who asks
            changed = [one for one in settings if one.exactness(now) is Exactness.CHANGED]
            assert all(0 < drift(one, now) < 10 for one in changed), kind
            assert all(drift(one, now) == 0 for one in settings if one not in changed), kind
    assert drift(Lazy(), ledger("chain")) == float("inf"), "a technique that states nothing is held to nothing"


@pytest.mark.parametrize(
    "name", ["chain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("u-net", "frozen bottom"))]
)
def test_every_technique_and_every_allowed_pair_needs_the_bytes_and_operations_that_were_rehearsed(name: str) -> None:
    made = job(name, optimizer=sgd)
    for plan in plans(name):
        predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
        mixed = any(type(one).__name__ == "Precision" for one in plan)
        assert abs(peak(predicted).bytes - peak(measured).bytes) <= 0.001 * mixed * peak(measured).bytes, plan
        assert predicted.flops.total() == measured.flops.total(), plan
        assert predicted.moved == measured.moved, plan


@pytest.mark.slow
def test_the_ledger_ranks_within_a_quarter_of_what_is_rehearsed() -> None:
    made = job("gpt2", optimizer=sgd)
    for plan in plans("gpt2"):
        by_ledger, rehearsed = total_cost(plan, ledger("gpt2")).peak, peak(rehearse(made, plan)).bytes
        assert abs(by_ledger - rehearsed) <= 0.25 * rehearsed, (plan, by_ledger, rehearsed)


@dataclass(frozen=True)
class Lazy(Technique):
    """A technique from outside: it skips every other update."""

    exact: ClassVar[bool] = False
    why: ClassVar[str] = "half the updates"

    def cost(self, now: Ledger) -> Ledger:
        return replace(now, update=replace(now.update, seconds=now.update.seconds / 2))

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
    run = build_run(made, (Lazy(),), seeded(made))
    losses = [float(loss) for loss in steps(run, islice(Feed(made), 6))]
    assert losses[0] > losses[-1]
