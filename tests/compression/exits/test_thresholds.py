"""Thresholds from evidence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from shoestring.compression.exits import ExitEvidence, at_least, at_most, calibrate, frontier, operate
from shoestring.core.errors import Mistake


def simulated(rows: int, seed: int, exits: int = 2, heads: float = 0.05) -> ExitEvidence:
    """Rows of some difficulty; every exit is right where it is easy enough, and about as sure as it should be."""
    random = torch.Generator().manual_seed(seed)
    hard = torch.rand(rows, 1, generator=random)
    skill = torch.linspace(0.55, 0.92, exits + 1)
    chance = torch.sigmoid(9 * (skill - hard))
    right = torch.rand(rows, exits + 1, generator=random) < chance
    sure = (chance[:, :-1] + 0.08 * torch.randn(rows, exits, generator=random)).clamp(0, 1)
    return ExitEvidence(sure, right, (1.0,) * (exits + 1), (heads,) * exits)


def reference(evidence: ExitEvidence, thresholds: tuple[float, ...]) -> tuple[float, float]:
    """Mean cost and quality, row by row."""
    cost = quality = 0.0
    for sure, right in zip(evidence.confidence.tolist(), evidence.right.tolist(), strict=True):
        for exit in range(len(thresholds) + 1):
            cost += evidence.parts[exit]
            if exit == len(thresholds):
                break
            cost += evidence.heads[exit] if thresholds[exit] < math.inf else 0
            if sure[exit] >= thresholds[exit]:
                break
        quality += right[exit]
    return cost / len(evidence.right), quality / len(evidence.right)


@pytest.mark.parametrize("thresholds", [(0.5, 0.7), (math.inf, 0.6), (0.9, math.inf), (math.inf, math.inf), (0.0, 0.0)])
def test_what_thresholds_do_is_what_happens_row_by_row(thresholds: tuple[float, float]) -> None:
    evidence = simulated(200, 1)
    point = operate(evidence, thresholds)
    assert (point.cost, point.quality) == pytest.approx(reference(evidence, thresholds))
    assert point.loss == pytest.approx(point.harmed - point.helped) and sum(point.shares) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(6))
def test_the_cost_is_near_that_of_all_pairs_of_thresholds(seed: int) -> None:
    evidence = simulated(25, seed)
    found = calibrate(evidence, 0.05)
    choices = [[*evidence.confidence[:, exit].tolist(), math.inf] for exit in range(2)]
    best = min(
        point.cost for pair in itertools.product(*choices) if (point := operate(evidence, pair)).loss <= 0.05 + 1e-12
    )
    assert found.point.loss <= 0.05 + 1e-12
    assert found.point.cost <= 1.05 * best


@pytest.mark.parametrize("seed", range(10))
def test_one_exit_has_its_exact_optimum(seed: int) -> None:
    evidence = simulated(60, seed, exits=1)
    choices = [*evidence.confidence[:, 0].tolist(), math.inf]
    best = min(point.cost for one in choices if (point := operate(evidence, (one,))).loss <= 0.02 + 1e-12)
    assert calibrate(evidence, 0.02).point.cost == pytest.approx(best)


def test_rows_that_tie_leave_together() -> None:
    sure = torch.tensor([0.9] * 5 + [0.5] * 5)[:, None]
    right = torch.ones(10, 2)
    right[4, 0] = 0  # one of those that tie
    evidence = ExitEvidence(sure, right, (1.0, 9.0), (0.0,))
    assert calibrate(evidence, 0.05).point.thresholds == (math.inf,), "half of the five can't leave"
    assert calibrate(evidence, 0.1).point.shares == (1.0, 0.0)


def test_an_exit_that_is_never_right_or_costs_too_much_is_not_used() -> None:
    evidence = simulated(300, 2)
    wrong = evidence.right.clone()
    wrong[:, 0] = 0
    found = calibrate(ExitEvidence(evidence.confidence, wrong, evidence.parts, evidence.heads), 0.0)
    assert found.point.thresholds[0] == math.inf
    dear = calibrate(ExitEvidence(evidence.confidence, evidence.right, evidence.parts, (0.0, 50.0)), 0.5)
    assert dear.point.thresholds[1] == math.inf and dear.point.speedup > 1


def test_the_frontier_has_no_point_that_another_beats_and_begins_with_no_loss_reachable() -> None:
    points = frontier(simulated(500, 3, exits=3), (0.005, 0.01))
    assert all(one.cost < other.cost and one.loss > other.loss for one, other in itertools.pairwise(points))
    assert points[-1].loss <= 0 and len(points) > 5


@pytest.mark.parametrize(
    "sure, parts, said",
    [
        (torch.tensor([[math.nan]]), (1.0, 1.0), "exits \\[0\\] are not numbers"),
        (torch.tensor([[0.5]]), (1.0,), "a part more than heads"),
        (torch.tensor([[0.5]]), (math.inf, 1.0), "finite"),
        (torch.tensor([[0.5, 0.5]]), (1.0, 1.0), "give"),
    ],
)
def test_broken_evidence_is_refused(sure: torch.Tensor, parts: tuple[float, ...], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        ExitEvidence(sure, torch.ones(1, 2), parts, (0.1,))


def test_calibration_refuses_what_it_cannot_promise() -> None:
    evidence = simulated(50, 0)
    with pytest.raises(Mistake, match="limit"):
        calibrate(evidence, -0.1)
    with pytest.raises(Mistake, match="right or wrong"):
        calibrate(
            ExitEvidence(evidence.confidence, evidence.right * 0.5, evidence.parts, evidence.heads), 0.1, delta=0.1
        )
    with pytest.raises(Mistake, match="for 2 exits"):
        operate(evidence, (0.5,))


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    beta = pytest.importorskip("scipy.stats").beta
    for count, rows, delta in itertools.product((0, 1, 7, 50), (50, 400), (0.01, 0.1)):
        upper = 1.0 if count == rows else beta.ppf(1 - delta, count + 1, rows - count)
        lower = 0.0 if count == 0 else beta.ppf(delta, count, rows - count + 1)
        assert at_most(count, rows, delta) == pytest.approx(upper, abs=1e-9)
        assert at_least(count, rows, delta) == pytest.approx(lower, abs=1e-9)


def kept_promises(times: int, delta: float | None, limit: float = 0.03) -> tuple[int, float]:
    """How often the loss on a population was more than promised, and the mean speed-up."""
    population, broken, speed = simulated(20000, 999), 0, 0.0
    for seed in range(times):
        chosen = calibrate(simulated(600, seed), limit, delta)
        there = operate(population, chosen.point.thresholds)
        broken, speed = broken + (there.loss > limit), speed + there.speedup / times
    return broken, speed


@pytest.mark.slow
def test_with_delta_the_promise_is_kept_and_without_it_is_not_one() -> None:
    broken, speed = kept_promises(40, 0.1)
    plain, faster = kept_promises(40, None)
    assert broken <= 7  # P(Binomial(40, 0.1) > 7) = 4.2 %; the seeds are fixed
    assert plain > broken and faster > speed > 1.0


def test_with_delta_a_bound_is_told_and_too_few_rows_change_nothing() -> None:
    found = calibrate(simulated(4000, 5), 0.02, delta=0.1)
    assert found.bound is not None and found.point.loss <= found.bound <= 0.02 and found.point.speedup > 1.1
    few = calibrate(simulated(20, 5), 0.005, delta=0.1)
    assert few.point.thresholds == (math.inf, math.inf) and few.bound == 0


def test_what_is_predicted_holds_on_rows_never_seen() -> None:
    chosen = calibrate(simulated(4000, 11), 0.01)
    there = operate(simulated(4000, 12), chosen.point.thresholds)
    assert there.speedup == pytest.approx(chosen.point.speedup, rel=0.05)
    assert there.shares == pytest.approx(chosen.point.shares, abs=0.04)
    assert abs(there.loss - chosen.point.loss) < 0.015


def test_what_a_batch_costs_however_few_rows_are_left_is_counted() -> None:
    sure, right = torch.tensor([[1.0], [1.0], [1.0], [0.0]]), torch.ones(4, 2)
    alone = operate(ExitEvidence(sure, right, (1.0, 1.0), (0.0,)), (0.5,))
    assert alone.cost == 1.25 and alone.speedup == 1.6
    together = operate(ExitEvidence(sure, right, (1.0, 1.0), (0.0,), fixed=(1.0, 1.0), leaving=0.5, batch=8), (0.5,))
    reached = 1 - 0.75**8  # that one of eight rows goes on
    assert together.cost == pytest.approx(1.25 + 1 + reached + 0.5) and together.speedup == pytest.approx(
        4 / together.cost
    )
    unused = operate(ExitEvidence(sure, right, (1.0, 1.0), (0.0,), fixed=(1.0, 1.0), leaving=0.5, batch=8), (math.inf,))
    assert unused.speedup == 1


@pytest.mark.parametrize("heads", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("delta", [None, 0.1])
def test_calibrated_thresholds_are_never_dearer_than_no_exits(heads: float, delta: float | None) -> None:
    """The first exit is right more often than the end, so that dear thresholds promise to lose less than nothing."""
    for seed in range(4):
        evidence = simulated(600, seed, heads=heads)
        better = torch.cat((torch.ones(600, 1, dtype=torch.float64), evidence.right[:, 1:]), 1)
        found = calibrate(ExitEvidence(evidence.confidence, better, evidence.parts, evidence.heads), 0.05, delta)
        assert found.point.cost <= evidence.whole and found.point.speedup >= 1 and found.point.loss <= 0.05
