"""Student's t distribution, for intervals and tests of means over few devices. (scipy is not a dependency.)

    P(|T| > t)  =  I_x(df / 2, 1 / 2),    x = df / (df + t^2)

I is the regularised incomplete beta function, here by its continued fraction (Press, Teukolsky, Vetterling, Flannery
2007, Numerical Recipes, section 6.4).
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, inf, isnan, lgamma, log, log1p, pi, sqrt
from statistics import NormalDist

from shoestring.core.errors import Mistake

NORMAL = 1e7  # degrees of freedom above which the normal distribution is used
TINY = 1e-300
CLOSE = 1e-15


def incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b). `y` is 1 - x; the caller passes it, because computing it here would lose digits.

    >>> round(incomplete_beta(2, 3, 0.4, 0.6), 10)   # 6 x^2 - 8 x^3 + 3 x^4
    0.5248
    """
    if x <= 0 or y <= 0:
        return float(y <= 0)
    if x > (a + 1) / (a + b + 2):  # the continued fraction converges quickly below this
        return 1 - incomplete_beta(b, a, y, x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(y)) / a
    return front * fraction(a, b, x)


def fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / nonzero(1 + term * d)
            c = nonzero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < CLOSE:
            break
    return value


def nonzero(value: float) -> float:
    return value if abs(value) > TINY else TINY


def tails(t: float, df: float) -> float:
    """P(|T| > |t|): the p value of a two-sided test.

    >>> round(tails(2.0, 10), 6), tails(0.0, 3)
    (0.073388, 1.0)
    """
    if isnan(t):
        return t
    if abs(t) == inf:
        return 0.0
    if df >= NORMAL:
        return 2 * NormalDist().cdf(-abs(t))
    return incomplete_beta(df / 2, 0.5, df / (df + t * t), t * t / (df + t * t))


@lru_cache(maxsize=4096)
def quantile(level: float, df: float) -> float:
    """The t for which |T| <= t has probability `level`.

    >>> round(quantile(0.95, 10), 6), round(quantile(0.95, 1), 4), round(quantile(0.95, 1e9), 6)
    (2.228139, 12.7062, 1.959964)
    """
    if not 0 < level < 1 or not df > 0:
        raise Mistake(
            f"a quantile of Student's t at level={level} with df={df}: give a level between 0 and 1 and degrees of freedom "
            f"above 0"
        )
    t = NormalDist().inv_cdf((1 + level) / 2)
    if df >= NORMAL:
        return t
    # The tail is convex and the normal quantile is left of the root, so Newton's steps approach the root without passing it
    scale = exp(lgamma((df + 1) / 2) - lgamma(df / 2)) / sqrt(df * pi)
    for _ in range(1000):
        step = (tails(t, df) - (1 - level)) / (2 * scale * exp(-(df + 1) / 2 * log1p(t * t / df)))
        t += step
        if abs(step) <= 1e-13 * t:
            break
    return t
