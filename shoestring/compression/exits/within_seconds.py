"""Thresholds for a limit on the seconds of an answer: the least damage with which a share of the answers keeps it.

    seconds(k) = whole model's * (cost_1 + ... + cost_k and the heads on the way) / cost of the whole model
    minimise mean damage   subject to   seconds at the percentile <= limit

An answer takes the seconds of the exit at which its row leaves, so the percentile is that of a mixture. To thresholds
of the frontier (thresholds.py), which minimise the mean, others are added: for every exit that with which just the
share of rows leaves there or before. Shares are known from a few held-out rows, so two of their standard errors count
as going to the end, except where an exit takes every row that reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf, sqrt

from shoestring.compression.calibration.latency import Latency, mixed_latency
from shoestring.compression.exits.thresholds import (
    NEVER,
    ExitEvidence,
    Point,
    Thresholds,
    between,
    costs,
    frontier,
    leaving,
    operate,
)
from shoestring.core.errors import Mistake
from shoestring.core.units import seconds_text

ALL = -inf  # threshold of an exit that takes every row


def least_damage(evidence: ExitEvidence, whole: Latency, seconds: float, share: float) -> Point:
    """The point with the least damage at which this share of the answers keeps the limit. `whole`: latency of the model
    without exits. Raises Mistake if there is none."""
    found = [operate(evidence, thresholds) for thresholds in proposals(evidence, share)]
    kept = [one for one in found if latency_at(evidence, one, whole, careful=share).at(share) <= seconds]
    if not kept:
        fastest = min(latency_at(evidence, one, whole, careful=share).at(share) for one in found)
        raise Mistake(
            f"with exits {share:.0%} of the answers take at most {seconds_text(fastest)}, and {seconds_text(seconds)} is "
            f"the limit: the first exit comes too late, or too few samples leave early"
        )
    return min(kept, key=lambda one: (one.loss, one.cost))


def latency_at(evidence: ExitEvidence, point: Point, whole: Latency, careful: float = 0.0) -> Latency:
    """The latency with these thresholds. `careful`: the share of answers for which standard errors count."""
    each = costs(evidence, point.thresholds) + (
        evidence.leaving if any(one < NEVER for one in point.thresholds) else 0.0
    )
    shares = list(point.shares)
    if ALL not in point.thresholds:
        doubt = 2 * sqrt(careful * (1 - careful) / point.rows)
        for exit in range(len(shares) - 1):
            moved = min(shares[exit], doubt)
            shares[exit], shares[-1], doubt = shares[exit] - moved, shares[-1] + moved, doubt - moved
    return mixed_latency(
        [
            (part, whole.times(cost / evidence.whole))
            for part, cost in zip(shares, each.tolist(), strict=True)
            if part > 0
        ]
    )


def proposals(evidence: ExitEvidence, share: float) -> Iterator[Thresholds]:
    exits, rows = len(evidence.heads), len(evidence.right)
    enough = share + 2 * sqrt(share * (1 - share) / rows)
    for point in frontier(evidence):
        yield point.thresholds
        for exit in range(exits):
            yield leaving_by(evidence, point.thresholds, exit, enough)
            yield (*point.thresholds[:exit], ALL, *(NEVER,) * (exits - exit - 1))


def leaving_by(evidence: ExitEvidence, thresholds: Thresholds, exit: int, share: float) -> Thresholds:
    """The same with another threshold at one exit: at least this share of rows leaves there or before.

    >>> from torch import ones, tensor
    >>> toy = ExitEvidence(tensor([[0.9, 0.1], [0.5, 0.7], [0.4, 0.5], [0.0, 0.25]]), ones(4, 3), (1.0, 1.0, 1.0), (0.0, 0.0))
    >>> leaving_by(toy, (0.8, NEVER), 1, 0.75), leaving_by(toy, (0.8, 0.9), 1, 1.0)
    ((0.8, 0.375), (0.8, -inf))
    """
    here = leaving(evidence, (*thresholds[:exit], *(NEVER,) * (len(thresholds) - exit))) > exit
    wanted = ceil(share * len(here) - 1e-9) - int((~here).sum())
    confidence = evidence.confidence[here, exit].sort(descending=True).values
    if wanted >= len(confidence):
        return (*thresholds[:exit], ALL, *(NEVER,) * (len(thresholds) - exit - 1))
    value = between(confidence, wanted - 1) if wanted > 0 else NEVER
    return (*thresholds[:exit], value, *thresholds[exit + 1 :])
