"""Calibrate the one number that no data sheet states: the fraction of its peak that a device reaches inside a large
matrix product."""

from __future__ import annotations

from collections.abc import Callable

from shoestring.core.errors import Mistake
from shoestring.training.on_paper.machines import Machines

LEAST, MOST = (0.01, 1.5)  # range of the search; a result above 1 means a wrong description, and is refused
HALVINGS = 50


def calibrate(machines: Machines, precision: str, published: float, predicted: Callable[[Machines], float]) -> Machines:
    """The machines with the efficiency at which the predicted speed, which grows with it, equals the published one."""
    low, high = LEAST, MOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if predicted(machines.with_efficiency(precision, middle)) > published else (middle, high)
        )
    if not LEAST * 1.01 < low < 1.0:
        raise Mistake(
            f"{published:g} is reached at {low:.0%} of the peak of {machines.name or 'the cluster'}, which can't be: "
            f"check the peak for {precision}, or what was published"
        )
    return machines.with_efficiency(precision, low)
