"""Epsilon is dp-accounting's, for the same events."""

from __future__ import annotations

import sys
import tracemalloc
from itertools import product

import pytest

from shoestring.core.errors import Mistake
from shoestring.privacy.account import (
    QUICK,
    SampledGaussian,
    composed_epsilon,
    epsilon_of,
    epsilon_spent,
    noise_for,
    round_up,
)

dp = pytest.importorskip("dp_accounting")
pld = pytest.importorskip("dp_accounting.pld")
FEW = [(2.0, 0.05, 100, 1e-6), (5.0, 1.0, 10, 1e-5), (3.0, 0.5, 1, 1e-6), (8.0, 0.01, 1000, 1e-7)]
ALL = [(*setting, 1e-6) for setting in product((0.6, 0.8, 1.0, 1.5, 4.0), (0.001, 0.01, 0.05, 0.3, 1.0), (1, 200))]


def direct(*events: tuple[float, float, int], delta: float) -> float:
    """What dp-accounting itself says."""
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for multiplier, rate, rounds in events:
        accountant.compose(
            dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), rounds)
        )
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("setting", FEW)
def test_epsilon_is_that_of_dp_accounting(setting: tuple[float, float, int, float]) -> None:
    assert epsilon_of(*setting) == direct(setting[:3], delta=setting[3])


@pytest.mark.slow
@pytest.mark.parametrize("setting", ALL)
def test_epsilon_is_that_of_dp_accounting_on_50_settings(setting: tuple[float, float, int, float]) -> None:
    assert len(ALL) == 50
    found = epsilon_of(*setting)
    assert found == direct(setting[:3], delta=setting[3])
    assert found <= epsilon_of(*setting, QUICK) <= found * 1.001 + 0.01


def test_rounds_of_several_kinds_are_composed() -> None:
    events = ((4.0, 0.05, 60), (6.0, 0.1, 40))
    found = epsilon_spent([(SampledGaussian(multiplier, rate), rounds) for multiplier, rate, rounds in events], 1e-6)
    assert found == direct(*events, delta=1e-6) > epsilon_of(4.0, 0.05, 60, 1e-6)


def test_the_quick_grid_errs_on_the_safe_side() -> None:
    for setting in FEW:
        exact, quick = epsilon_of(*setting), epsilon_of(*setting, QUICK)
        assert exact <= quick <= exact * 1.001 + 0.01


@pytest.mark.parametrize("rate", [1.0, 1e-2, 1e-4])
def test_an_epsilon_that_promises_little_takes_little_memory(rate: float) -> None:
    epsilon_of(1.0, rate, 1, 1e-6)  # imports
    tracemalloc.start()
    try:
        assert epsilon_of(0.1, rate, 4000, 1e-6) > 200
        assert tracemalloc.get_traced_memory()[1] < 150e6
    finally:
        tracemalloc.stop()


def test_epsilon_after_every_round_is_looked_up_the_second_time() -> None:
    curve = [epsilon_of(3.0, 0.1, rounds, 1e-6, QUICK) for rounds in range(1, 11)]
    before = composed_epsilon.cache_info().misses
    assert [epsilon_of(3.0, 0.1, rounds, 1e-6, QUICK) for rounds in range(1, 11)] == curve == sorted(curve)
    assert composed_epsilon.cache_info().misses == before


@pytest.mark.parametrize(("epsilon", "rate", "rounds"), [(1.0, 0.05, 50), (0.2, 0.1, 10), (3.0, 1.0, 3)])
def test_noise_is_the_least_of_four_digits_that_keeps_within_epsilon(epsilon: float, rate: float, rounds: int) -> None:
    found = noise_for(epsilon, rate, rounds, 1e-5)
    assert float(f"{found:.4g}") == found
    assert direct((found, rate, rounds), delta=1e-5) <= epsilon < direct((found * (1 - 3e-3), rate, rounds), delta=1e-5)


def test_little_noise_is_never_too_little() -> None:
    assert noise_for(1e6, 0.01, 2, 1e-5) == 0.3


@pytest.mark.parametrize("number", [1.0, 0.2, 1.2345, 9.9999, 99999.0, 0.00012341, 3e-7, 1e5])
def test_rounding_up_never_goes_down(number: float) -> None:
    found = round_up(number)
    assert number * (1 - 1e-9) <= found <= number * 1.0011 and float(f"{found:.4g}") == found


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in (
        (0.0, 0.1, 1, 1e-6),
        (1.0, 0.0, 1, 1e-6),
        (1.0, 1.5, 1, 1e-6),
        (1.0, 0.1, 1, 0.0),
        (1.0, 0.1, 1, 1.0),
    ):
        with pytest.raises(Mistake):
            epsilon_of(*wrong)
    with pytest.raises(Mistake, match="epsilon"):
        noise_for(0.0, 0.1, 1, 1e-6)
    with pytest.raises(Mistake, match="larger epsilon"):
        noise_for(1e-3, 1.0, 10**6, 1e-9)
    assert epsilon_spent((), 1e-6) == 0.0


def test_without_dp_accounting_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    composed_epsilon.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(Mistake, match=r"shoestring\[private\]"):
        epsilon_of(2.5, 0.1, 1, 1e-6)
