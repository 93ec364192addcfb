"""Adaptive computation time: an item (a row, a position, a token) is computed in steps until its halting probabilities
sum to one.

    N = min{ n : h_1 + ... + h_n >= 1 - epsilon }, at most `max_steps`        steps of the item
    R = 1 - (h_1 + ... + h_{N-1})                                            its remainder
    p_n = h_n for n < N, R for n = N                                         output: sum_n p_n s_n
    ponder = N + R                                                           added to the loss, times tau

Only R has a derivative. Graves: Adaptive Computation Time for Recurrent Neural Networks, 2016, arXiv 1603.08983.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.job import Job

EPSILON = 0.01  # Graves's value: lets an item halt after one step


class Pondered(NamedTuple):
    """An output with its ponder cost. A model that continues from the output keeps the cost:
    `found.map(self.classify)`."""

    value: Any
    ponder: Tensor  # (rows,) mean of N + R over the row's items; differentiable
    steps: Tensor  # N of every item, 0 for padding

    def map(self, change: Callable[[Any], Any]) -> Pondered:
        """
        >>> Pondered(torch.ones(2), torch.zeros(2), torch.ones(2)).map(lambda value: value + 1).value
        tensor([2., 2.])
        """
        return self._replace(value=change(self.value))


class Halting(NamedTuple):
    """The meaning of a step's halting probabilities, for items that are still running."""

    weight: Tensor  # weight of the step's state in the output: h, or the remainder of one
    ends: Tensor  # bool: the item halts in this step
    total: Tensor  # sum of halting probabilities so far
    remainder: Tensor  # R if the item halts, else 0


def halt(probability: Tensor, total: Tensor, last: bool, epsilon: float = EPSILON) -> Halting:
    """One step of halting, for running items.

    >>> found = halt(torch.tensor([0.3, 0.8]), torch.tensor([0.25, 0.25]), last=False)
    >>> found.ends.tolist(), [round(value, 2) for value in found.weight.tolist()]
    ([False, True], [0.3, 0.75])
    """
    after = total + probability
    ends = torch.ones_like(after, dtype=torch.bool) if last else after >= 1 - epsilon
    left = 1 - total
    return Halting(torch.where(ends, left, probability), ends, after, torch.where(ends, left, torch.zeros_like(left)))


def check_limits(max_steps: int, epsilon: float) -> None:
    if max_steps < 1 or not 0 < epsilon < 1:
        raise Mistake(
            f"max_steps={max_steps}, epsilon={epsilon}: give at least one step, and an epsilon between 0 and 1 such as {EPSILON}"
        )


def ponder_job(job: Job, tau: float) -> Job:
    """The job of a model that returns a `Pondered`, with the ponder cost added to its loss; the job's own loss and
    metrics only see the value.

    loss = loss(value, batch) + tau * mean over rows of ponder
    """
    if not tau >= 0:
        raise Mistake(f"tau={tau}: what a step costs is 0 or more; Graves tries 1e-4 to 1e-1")
    inner, metrics = job.loss, job.metrics

    def loss(output: Any, batch: Any) -> Tensor:
        found = check_pondered(output)
        return inner(found.value, batch) + tau * found.ponder.mean()

    def with_steps(output: Any, batch: Any) -> Mapping[str, Any]:
        found = check_pondered(output)
        taken = found.steps[found.steps > 0].float()
        return {
            **(metrics(found.value, batch) if metrics is not None else {}),
            "steps": taken.mean() if len(taken) else torch.zeros(()),
        }

    return replace(job, loss=loss, metrics=with_steps if job.held_out is not None or job.clients is not None else None)


def check_pondered(output: Any) -> Pondered:
    if not isinstance(output, Pondered):
        raise Mistake(
            f"the model gave a {type(output).__name__}, and the ponder cost travels in a Pondered: let the model's forward "
            f"return what its adaptive module gave, changed by .map(...)"
        )
    return output
