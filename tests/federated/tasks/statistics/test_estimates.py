from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from shoestring.federated.tasks.statistics.aggregates import Floats, sums_of
from shoestring.federated.tasks.statistics.estimates import (
    WEIGHINGS,
    by_device,
    by_sample,
    effective_devices,
    independent_difference,
    paired_difference,
)
from shoestring.federated.tasks.statistics.student import quantile

EXPERIMENTS = 1000


def summed(weights: Floats, *columns: Floats) -> Floats:
    """Of weights and means per device (..., devices), the sums over devices."""
    return sums_of(weights, weights[..., None] * np.stack(columns, axis=-1)).sum(-2)


def heavy(random: Generator, shape: tuple[int, int]) -> Floats:
    """Student's t with 5 degrees of freedom, at variance 1."""
    return random.standard_t(5, shape) / np.sqrt(5 / 3)


def skewed(random: Generator, shape: tuple[int, int]) -> Floats:
    """A gamma distribution with a skewness of 1 and heavier than normal tails, at variance 1."""
    return (random.gamma(4.0, size=shape) - 4) / 2


Tail = Callable[[Generator, tuple[int, int]], Floats]
TRUTH = 3.0  # percent


def world(random: Generator, devices: int, tail: Tail, change: float = TRUTH) -> tuple[Floats, Floats, Floats]:
    """Samples of devices, lognormal, and what they measure of A and of B: devices differ, and so does what the change does to them."""
    shape = (EXPERIMENTS, devices)
    weights = np.maximum(np.round(20 * np.exp(random.normal(size=shape))), 1.0)
    device = tail(random, shape)
    a = 2 * (1 + 0.35 * device) + 0.8 * tail(random, shape) / np.sqrt(weights)
    b = a + 2 * change / 100 * (1 + 0.1 * device + tail(random, shape)) + 0.3 * tail(random, shape) / np.sqrt(weights)
    return weights, a, b


@pytest.mark.parametrize("by", ["devices", "samples"])
@pytest.mark.parametrize("tail", [heavy, skewed])
@pytest.mark.parametrize("devices", [30, 200])
def test_the_paired_interval_covers_the_truth_in_95_percent_of_experiments(devices: int, tail: Tail, by: str) -> None:
    weights, a, b = world(np.random.default_rng(1), devices, tail)
    found = paired_difference(WEIGHINGS[by](summed(weights, a, b - a), 2))
    assert 0.93 <= np.mean((found.low <= TRUTH) & (found.high >= TRUTH)) <= 0.97


@pytest.mark.parametrize("by", ["devices", "samples"])
@pytest.mark.parametrize("tail", [heavy, skewed])
@pytest.mark.parametrize("devices", [(30, 30), (30, 120), (200, 200)])
def test_the_interval_of_two_samples_covers_the_truth_in_95_percent_of_experiments(
    devices: tuple[int, int], tail: Tail, by: str
) -> None:
    random = np.random.default_rng(2)
    (w1, a, _), (w2, _, b) = world(random, devices[0], tail), world(random, devices[1], tail)
    found = independent_difference(WEIGHINGS[by](summed(w1, a), 1), WEIGHINGS[by](summed(w2, b), 1))
    assert 0.93 <= np.mean((found.low <= TRUTH) & (found.high >= TRUTH)) <= 0.97


def test_without_a_difference_five_percent_of_experiments_see_one() -> None:
    weights, a, b = world(np.random.default_rng(3), 30, heavy, change=0.0)
    found = paired_difference(by_device(summed(weights, a, b - a), 2))
    seen = found.p < 0.05
    assert 0.03 <= seen.mean() <= 0.07
    assert np.array_equal(seen, (found.low > 0) | (found.high < 0)), "the interval leaves 0 out where p says so"


def test_pairing_narrows_the_interval_where_devices_differ() -> None:
    weights, a, b = world(np.random.default_rng(4), 30, heavy)
    same = paired_difference(by_device(summed(weights, a, b - a), 2))
    apart = independent_difference(by_device(summed(weights, a), 1), by_device(summed(weights, b), 1))
    assert np.median(same.high - same.low) < 0.5 * np.median(apart.high - apart.low)


def test_means_over_devices_are_those_of_numpy() -> None:
    random = np.random.default_rng(5)
    weights, a, d = random.integers(1, 90, 40).astype(float), random.normal(3, 1, 40), random.normal(0.1, 0.2, 40)
    found = by_device(summed(weights, a, d), 2)
    assert found.mean == pytest.approx([a.mean(), d.mean()])
    assert found.cov == pytest.approx(np.cov(a, d) / 40) and found.df == 39


def test_means_over_samples_are_a_ratio_and_equal_devices_are_the_usual_case() -> None:
    random = np.random.default_rng(6)
    weights, values = random.integers(1, 90, 40).astype(float), random.normal(3, 1, 40)
    found = by_sample(summed(weights, values), 1)
    mean = np.average(values, weights=weights)
    assert found.mean[0] == pytest.approx(mean)
    share = weights / weights.sum()
    # E sum share^2 (v - mean)^2 of values of variance 1 is sum over i of share_i^2 ((1 - share_i)^2 + sum of the other shares^2)
    expected = (share**2 * ((1 - share) ** 2 + (share**2).sum() - share**2)).sum()
    assert found.cov[0, 0] == pytest.approx((share**2 * (values - mean) ** 2).sum() / expected * (share**2).sum())
    equal = np.full(40, 7.0)
    assert by_sample(summed(equal, values), 1).cov == pytest.approx(by_device(summed(equal, values), 1).cov)
    assert effective_devices(summed(equal, values)) == pytest.approx(40)


def test_the_interval_is_where_the_test_of_d_minus_delta_a_accepts() -> None:
    random = np.random.default_rng(7)
    a, b = random.normal(3, 2, 25), random.normal(3.5, 2, 25)
    found = paired_difference(by_device(summed(np.ones(25), a, b - a), 2))
    for end in (found.low, found.high):
        z = (b - a) - end / 100 * a
        assert abs(z.mean()) / (z.std(ddof=1) / 5) == pytest.approx(quantile(0.95, 24))


def test_a_negative_mean_keeps_the_direction_of_the_difference() -> None:
    a = np.array([-2.0, -2.2, -1.9, -2.1])
    found = paired_difference(by_device(summed(np.ones(4), a, np.full(4, 0.2)), 2))
    assert found.percent == pytest.approx(100 * 0.2 / 2.05) and found.low < found.percent < found.high


def test_a_mean_that_may_be_zero_has_no_percentage() -> None:
    random = np.random.default_rng(8)
    a = random.normal(0, 1, 20)
    found = paired_difference(by_device(summed(np.ones(20), a, random.normal(5, 1, 20)), 2))
    assert np.isnan(found.low) and np.isnan(found.high) and found.p < 1e-9
    none = paired_difference(by_device(summed(np.ones(20), np.zeros(20), np.ones(20)), 2))
    assert np.isnan(none.percent) and none.delta == 1


def test_equal_results_are_no_difference_and_rounding_makes_no_variance_negative() -> None:
    a = np.full(30, 1e6 + 0.1)
    found = paired_difference(by_device(summed(np.full(30, 3.0), a, np.zeros(30)), 2))
    assert found.p == 1 and found.delta == 0 and found.error == 0
    assert (
        by_device(summed(np.full(30, 3.0), a), 1).cov[0, 0] >= 0
        and by_sample(summed(np.full(30, 3.0), a), 1).cov[0, 0] >= 0
    )
