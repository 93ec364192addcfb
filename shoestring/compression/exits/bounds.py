"""Clopper-Pearson bounds of a proportion, valid for every number of rows.

    at_most(k, n, delta)  = max{ p : P(Binomial(n, p) <= k) >= delta }        the proportion is higher with probability at most delta
    at_least(k, n, delta) = 1 - at_most(n - k, n, delta)

Clopper, Pearson: The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial, 1934, Biometrika 26.
"""

from __future__ import annotations

import torch

from shoestring.core.errors import Mistake

HALVINGS = 60


def at_most(count: int, rows: int, delta: float) -> float:
    """
    >>> round(at_most(0, 100, 0.05), 5)   # 1 - 0.05 ** (1 / 100)
    0.02951
    """
    if not 0 <= count <= rows or rows < 1 or not 0 < delta < 1:
        raise Mistake(f"{count} of {rows} rows with delta={delta}: a share needs rows, and delta lies between 0 and 1")
    if count == rows:
        return 1.0
    low, high = count / rows, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most_count(count, rows, middle) >= delta else (low, middle)
    return high


def at_least(count: int, rows: int, delta: float) -> float:
    return 1 - at_most(rows - count, rows, delta)


def at_most_count(count: int, rows: int, share: float) -> float:
    """P(Binomial(rows, share) <= count)."""
    if share <= 0 or share >= 1:
        return 1.0 if share <= 0 or count >= rows else 0.0
    k, n = torch.arange(count + 1, dtype=torch.float64), torch.tensor(float(rows), dtype=torch.float64)
    p = torch.tensor(share, dtype=torch.float64)
    logarithms = (
        torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1) + k * p.log() + (n - k) * torch.log1p(-p)
    )
    return float(torch.logsumexp(logarithms, 0).exp())
