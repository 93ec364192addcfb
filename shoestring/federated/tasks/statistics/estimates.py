"""Means over devices and over samples, their standard errors, and the interval of a difference in percent, computed
from sums alone.

Devices were drawn at random and samples within a device are not independent, so both means have a standard error
between devices.

    over devices    m = sum v_i / n           var = sum (v_i - m)^2 / (n (n - 1))                      n - 1 degrees of freedom
    over samples    r = sum s_i / sum w_i     var = sum (s_i - r w_i)^2 / ((sum w_i)^2 f)              (sum w)^2 / sum w^2 - 1
                    f = 1 + sum w^2 / (sum w)^2 - 2 sum w^3 / (sum w sum w^2)      large devices pull r to themselves; equal ones: 1 - 1/n

f corrects the bias of sum (s_i - r w_i)^2 if the variance is the same on all devices. The degrees of freedom are those
of the effective number of devices (Bell, McCaffrey 2002, Bias reduction in standard errors for linear regression with
multi-stage samples, Survey Methodology 28; Kish 1965, Survey Sampling, section 8.2).

The difference in percent is a ratio, d / a, with Fieller's interval: all delta for which the mean of d - delta a may be
0,

    (d - delta a)^2  <=  t^2 (var d - 2 delta cov(a, d) + delta^2 var a)

It keeps its level even if a is uncertain (Fieller 1954, Some problems in interval estimation, J. Royal Statistical
Society B 16). If a is not significantly different from 0, there is no interval. Two independent samples use d = b - a
and the degrees of freedom of Welch (1947, The generalization of Student's problem when several different population
variances are involved, Biometrika 34).

All functions take one set of sums or an array of many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shoestring.federated.tasks.statistics.aggregates import HEAD, Floats, upper_indices
from shoestring.federated.tasks.statistics.student import quantile, tails

LEVEL = 0.95
LEAST_F = 0.25  # lower bound for f, which nears 0 if one device has nearly all samples
ROUNDING = 16 * float(np.finfo(np.float64).eps)


class Means(NamedTuple):
    mean: Floats  # (..., k)
    cov: Floats  # (..., k, k): covariance of these means
    df: Floats  # (...): degrees of freedom
    rounding: Floats  # (..., k): variances below this are rounding errors


class EstimateSums(NamedTuple):
    devices: Floats
    w: Floats
    w2: Floats
    w3: Floats
    v: Floats  # (..., k)
    vv: Floats  # (..., k, k)
    s: Floats
    ws: Floats
    ss: Floats


def split_sums(sums: Floats, k: int) -> EstimateSums:
    """Split a row of sums into its parts, in the order of `aggregates`."""
    half = k * (k + 1) // 2
    ends = np.cumsum([HEAD, k, half, k, k, half])
    head, v, vv, s, ws, ss = np.split(sums, ends[:-1], axis=-1)
    return EstimateSums(
        head[..., 0], head[..., 1], head[..., 2], head[..., 3], v, symmetric(vv, k), s, ws, symmetric(ss, k)
    )


def symmetric(half: Floats, k: int) -> Floats:
    i, j = upper_indices(k)
    whole = np.zeros((*half.shape[:-1], k, k))
    whole[..., i, j] = whole[..., j, i] = half
    return whole


def outer(a: Floats, b: Floats) -> Floats:
    return a[..., :, None] * b[..., None, :]


def by_device(sums: Floats, k: int) -> Means:
    """Means in which every device has the same weight."""
    found = split_sums(sums, k)
    n = found.devices[..., None]
    mean = found.v / n
    scale = n * np.maximum(n - 1, 1)
    cov = (found.vv - outer(mean, mean) * n[..., None]) / scale[..., None]
    return nonnegative_variances(mean, cov, np.maximum(found.devices - 1, 1), ROUNDING * diagonal(found.vv) / scale)


def by_sample(sums: Floats, k: int) -> Means:
    """Means in which every sample has the same weight."""
    found = split_sums(sums, k)
    w, w2 = found.w[..., None], found.w2[..., None]
    mean = found.s / w
    crossed = outer(mean, found.ws)
    residual = found.ss - crossed - crossed.swapaxes(-1, -2) + outer(mean, mean) * w2[..., None]
    pulled = np.maximum(1 + found.w2 / found.w**2 - 2 * found.w3 / (found.w * found.w2), LEAST_F)[..., None]
    scale = w**2 * pulled
    return nonnegative_variances(
        mean,
        residual / scale[..., None],
        np.maximum(effective_devices(sums) - 1, 1),
        ROUNDING * diagonal(found.ss) / scale,
    )


def effective_devices(sums: Floats) -> Floats:
    """Effective number of devices (Kish): as many equal devices would be equally informative."""
    w, w2 = sums[..., 1], sums[..., 2]
    return np.asarray(w**2 / w2)


def diagonal(matrix: Floats) -> Floats:
    return np.diagonal(matrix, axis1=-2, axis2=-1)


def nonnegative_variances(mean: Floats, cov: Floats, df: Floats, rounding: Floats) -> Means:
    """Make Means with variances that rounding can't make negative."""
    cov = cov.copy()
    places = np.arange(mean.shape[-1])
    cov[..., places, places] = np.maximum(diagonal(cov), 0.0)
    return Means(mean, cov, df, rounding)


WEIGHINGS: dict[str, Callable[[Floats, int], Means]] = {"devices": by_device, "samples": by_sample}


class Difference(NamedTuple):
    """The difference of b to a. Percentages are of |a|; nan if a is not significantly different from 0, or is withheld."""

    a: Floats
    b: Floats
    delta: Floats  # b - a
    error: Floats  # its standard error
    percent: Floats
    low: Floats  # percent
    high: Floats  # percent
    p: Floats  # p value of no difference


def paired_difference(found: Means) -> Difference:
    """The difference if the same devices measured both; the columns are a and d = b - a."""
    a, d = found.mean[..., 0], found.mean[..., 1]
    return difference(a, d, found.cov[..., 0, 0], found.cov[..., 0, 1], found.cov[..., 1, 1], found.df)


def independent_difference(first: Means, second: Means) -> Difference:
    """The difference if other devices measured b, from the first column of each sample."""
    a, b, va, vb = first.mean[..., 0], second.mean[..., 0], first.cov[..., 0, 0], second.cov[..., 0, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(a != 0, b / a, 1.0)
        x, y = vb, ratio**2 * va
        df = np.where(x + y > 0, (x + y) ** 2 / (x**2 / second.df + y**2 / first.df), first.df + second.df)
    return difference(a, b - a, va, -va, va + vb, df)


def difference(a: Floats, d: Floats, vaa: Floats, vad: Floats, vdd: Floats, df: Floats) -> Difference:
    sign = np.where(a < 0, -1.0, 1.0)  # percentages of |a|
    size, vad = sign * a, sign * vad
    t = np.vectorize(lambda one: quantile(LEVEL, float(one)) if one > 0 else np.nan, otypes=[float])(df)
    error = np.sqrt(np.maximum(vdd, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        square, middle, rest = size**2 - t**2 * vaa, d * size - t**2 * vad, d**2 - t**2 * vdd
        wide = np.sqrt(np.maximum(middle**2 - square * rest, 0.0))
        low, high = (np.where(square > 0, 100 * (middle + way * wide) / square, np.nan) for way in (-1, 1))
        percent = np.where(size > 0, 100 * d / size, np.nan)
        p = np.vectorize(tails, otypes=[float])(np.where(d == 0, 0.0, d / error), df)
    return Difference(a, a + d, d, error, percent, low, high, p)
