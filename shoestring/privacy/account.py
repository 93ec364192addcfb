"""Privacy accounting: epsilon of many rounds of the subsampled Gaussian mechanism, by dp-accounting's privacy loss
distributions.

    a round: every device takes part with probability q (Poisson sampling); it releases the sum of updates of norm C or less + N(0, (z C)^2)
    P[out | with her]  <=  e^epsilon P[out | without her] + delta, for all rounds together          z: noise multiplier

Google's dp-accounting computes the distribution of the log of that ratio on a grid, always rounding against us, and
convolves it with itself for every round: Koskela, Jälkö, Honkela 2020, Computing Tight Differential Privacy Guarantees
Using FFT, arXiv 1906.03049; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, Connect the Dots, arXiv 2207.04380.
`EXACT` is dp-accounting's own grid: 0.2 to 1 s for the first epsilon of a multiplier. `QUICK` is ten times coarser and
faster; its epsilon is never smaller, and larger by about 1e-5 of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, inf, log10, sqrt
from typing import Any

from shoestring.core.command_line.extras import require
from shoestring.core.errors import Mistake

EXACT, QUICK, COARSE = 1e-4, 1e-3, 1e-2  # spacing of the grid, in units of epsilon
LEAST, MOST = 0.3, 1e5  # range of noise multipliers that is searched
DIGITS = 4  # significant digits of a noise multiplier
# Limits of what is computed; a promise beyond them is none, and its distribution would need gigabytes
FAINT = 0.1  # a smaller noise multiplier: the epsilon of one round alone may be above 80
FAR = 2e5  # sum of rounds / (2 multiplier^2), the mean privacy loss if everybody takes part
LARGE = 1000.0  # a larger epsilon is not computed on a finer grid


@dataclass(frozen=True)
class SampledGaussian:
    """One noisy sum over devices that were sampled independently with the same probability."""

    multiplier: float  # noise multiplier: standard deviation of the noise, in units of the largest norm of an update
    rate: float  # sampling rate: probability that a device takes part

    def __post_init__(self) -> None:
        if not 0 < self.multiplier < inf or not 0 < self.rate <= 1:
            raise Mistake(
                f"noise with multiplier={self.multiplier} and devices taken at the rate {self.rate}: the multiplier must be "
                f"above 0, and the rate above 0 and at most 1"
            )


Events = tuple[tuple[SampledGaussian, int], ...]  # kinds of rounds, and how many rounds there were of each kind


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise Mistake(
            f"delta={delta}: it is the probability that epsilon does not hold, above 0 and below 1; give less than 1 / clients, "
            f"such as --delta 1e-6"
        )


def epsilon_of(multiplier: float, rate: float, rounds: int, delta: float, interval: float = EXACT) -> float:
    """Epsilon of so many equal rounds."""
    return epsilon_spent(((SampledGaussian(multiplier, rate), rounds),), delta, interval)


def epsilon_spent(events: Iterable[tuple[SampledGaussian, int]], delta: float, interval: float = EXACT) -> float:
    """Epsilon of rounds of several kinds; 0 if there were no rounds, infinite if it is too large to be computed."""
    check_delta(delta)
    return composed_epsilon(tuple((kind, count) for kind, count in events if count), delta, interval)


@lru_cache(maxsize=4096)
def composed_epsilon(events: Events, delta: float, interval: float) -> float:
    if not events:
        return 0.0
    if (
        min(kind.multiplier for kind, _ in events) < FAINT
        or sum(count / (2 * kind.multiplier**2) for kind, count in events) > FAR
    ):
        return inf
    if interval < QUICK and (quick := composed_epsilon(events, delta, QUICK)) > LARGE:
        return quick
    total = accounting_library().identity(value_discretization_interval=interval)
    for kind, count in events:
        total = total.compose(privacy_loss(kind, interval).self_compose(count))
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def privacy_loss(kind: SampledGaussian, interval: float) -> Any:
    """The privacy loss distribution of one round. It takes most of the time, so it is cached."""
    from dp_accounting import NeighboringRelation

    return accounting_library().from_gaussian_mechanism(
        standard_deviation=kind.multiplier,
        sampling_prob=kind.rate,
        value_discretization_interval=interval,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


def accounting_library() -> Any:
    """dp-accounting, imported on first use: that takes a second."""
    require("private")
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution


@lru_cache(maxsize=256)
def noise_for(epsilon: float, rate: float, rounds: int, delta: float) -> float:
    """The smallest noise multiplier, with four digits, that keeps so many rounds within epsilon.

    A coarse grid finds it quickly. The coarse grid's error at that point then corrects the target, and the exact grid
    checks the result.
    """
    check_delta(delta)
    if not 0 < epsilon < inf:
        raise Mistake(f"epsilon={epsilon}: give a number above 0; 1 to 10 are usual")
    grid = min(COARSE, max(epsilon / 100, EXACT))
    safe = least_noise(epsilon, rate, rounds, delta, grid)
    if safe <= LEAST:
        return LEAST
    off = epsilon_of(safe, rate, rounds, delta, grid) - epsilon_of(safe, rate, rounds, delta)
    found = round_up(least_noise(epsilon + off, rate, rounds, delta, grid))
    while epsilon_of(found, rate, rounds, delta) > epsilon:
        found = round_up(found * (1 + 0.1**DIGITS))
    return found


def least_noise(epsilon: float, rate: float, rounds: int, delta: float, interval: float) -> float:
    """The smallest noise multiplier on one grid, to half a unit of its last digit."""

    def is_enough(multiplier: float) -> bool:
        return epsilon_of(multiplier, rate, rounds, delta, interval) <= epsilon

    if not is_enough(MOST):
        raise Mistake(
            f"epsilon {epsilon:g} for {rounds} rounds, with the sampling rate {rate:g}: not even noise "
            f"{MOST:g} times as large as an update is enough; allow a larger epsilon, or fewer rounds"
        )
    low, high = 1.0, 1.0  # start high: epsilon takes longer to compute with less noise
    while not is_enough(high):
        low, high = high, 2 * high
    while low == high > LEAST:
        low = max(high / 2, LEAST)
        high = low if is_enough(low) else high
    while high / low > 1 + 0.1**DIGITS / 2:
        middle = sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def round_up(number: float, digits: int = DIGITS) -> float:
    """Round up to so many significant digits, so that printing and reading the number gives it back.

    >>> round_up(1.23401), round_up(0.7654), round_up(123456.0)
    (1.235, 0.7654, 123500.0)
    """
    scale = digits - 1 - floor(log10(number))
    wanted = number * 10**scale if scale >= 0 else number / 10**-scale
    whole = round(wanted) if abs(wanted - round(wanted)) < 1e-9 * wanted else ceil(wanted)
    return float(f"{whole}e{-scale}")
