"""Pruning schedules: the share of zeros in every step. Cubic, or the same amount every so many steps.

    cubic                      s_t = s_f (1 - (1 - (t - t0) / (n dt))^3)        t = t0, t0 + dt, ..., t0 + n dt
    amount a of all weights    s_t = min(s_f, i a)                              i = (t - t0) / dt
    amount a of those left     s_t = min(s_f, 1 - (1 - a)^i)

Cubic: Zhu, Gupta 2017, To prune, or not to prune: exploring the efficacy of pruning for model compression, arXiv
1710.01878. Many weights are pruned early, while there are many to spare, and few late. Amount of those left: Frankle,
Carbin 2019, The Lottery Ticket Hypothesis, arXiv 1803.03635.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

from shoestring.core.errors import Mistake

UPDATES = 100  # default number of mask changes
AMOUNTS_OF = ("all", "left")


@dataclass(frozen=True)
class SparsitySchedule:
    """A schedule in steps, counted from 1. Masks change before step `begin + i every`, for i up to n."""

    share: float  # share of the weights that are zero at the end
    begin: int  # t0: the last step with all weights
    every: int  # dt
    updates: int  # n
    amount: float = 0.0  # share pruned each time; 0: the cubic schedule
    amount_of: str = "all"  # `amount` is a share of "all" original weights, or of those "left"

    @property
    def end(self) -> int:
        """The first step with the final masks."""
        return self.begin + self.updates * self.every

    def due(self, step: int) -> bool:
        """Whether masks change before this step.

        >>> [step for step in range(1, 12) if SparsitySchedule(0.9, begin=2, every=3, updates=2).due(step)]
        [5, 8]
        """
        return self.begin < step <= self.end and not (step - self.begin) % self.every

    def share_at(self, step: int) -> float:
        """The share of zeros in this step.

        >>> schedule = SparsitySchedule(0.64, begin=10, every=10, updates=4)
        >>> [round(schedule.share_at(step), 3) for step in (10, 20, 29, 30, 40, 50, 90)]
        [0.0, 0.37, 0.37, 0.56, 0.63, 0.64, 0.64]
        """
        update = min(max((step - self.begin) // self.every, 0), self.updates)
        if not self.amount:
            return self.share * (1 - (1 - update / self.updates) ** 3)
        gone = update * self.amount if self.amount_of == "all" else 1 - (1 - self.amount) ** update
        return self.share if update == self.updates else min(gone, self.share)


def check_schedule(
    share: float, begin: float, end: float, every: int, amount: float = 0.0, amount_of: str = "all"
) -> None:
    """Refuse settings that are impossible for any number of steps."""
    if not 0 < share < 1:
        raise Mistake(
            f"share={share}: it is the share of weights that are zero in the end: give more than 0 and less than 1, such as 0.9"
        )
    if not 0 <= begin < end <= 1:
        raise Mistake(
            f"begin={begin}, end={end}: they are shares of the training's steps: give 0 <= begin < end <= 1, such as 0.1 and 0.7"
        )
    if every < 0:
        raise Mistake(
            f"every={every}: masks change every so many steps: give 1 or more, or 0 for about {UPDATES} changes in all"
        )
    if amount_of not in AMOUNTS_OF:
        raise Mistake(f"amount_of={amount_of!r}: an amount is a share of {' or '.join(AMOUNTS_OF)} weights")
    if not 0 <= amount < 1:
        raise Mistake(
            f"amount={amount}: it is the share of weights that goes each time: give more than 0 and less than 1, such as 0.05"
        )


def make_schedule(
    share: float, steps: int, begin: float, end: float, every: int, amount: float = 0.0, amount_of: str = "all"
) -> SparsitySchedule:
    """The schedule of a training of `steps` steps; `begin` and `end` are fractions of them; `every` = 0: about a
    hundred updates. With an `amount`: as many updates as needed to reach the share, from `begin` on; `every` = 0: as
    far apart as fit.

    >>> make_schedule(0.9, steps=1000, begin=0.1, end=0.7, every=0)
    SparsitySchedule(share=0.9, begin=100, every=6, updates=100, amount=0.0, amount_of='all')
    >>> make_schedule(0.9, steps=100, begin=0.0, end=1.0, every=7).end
    98
    >>> five_percent = make_schedule(0.2, steps=1000, begin=0.1, end=0.7, every=50, amount=0.05)   # 5 % every 50 steps
    >>> [(step, round(five_percent.share_at(step), 3)) for step in range(100, 401, 50) if five_percent.due(step)]
    [(150, 0.05), (200, 0.1), (250, 0.15), (300, 0.2)]
    """
    check_schedule(share, begin, end, every, amount, amount_of)
    first, last = int(begin * steps), int(end * steps)
    span = last - first
    if span < max(every, 1):
        raise Mistake(
            f"{steps} steps, of which {span} lie between begin={begin} and end={end}, and every={every}: no mask would ever "
            f"change; train longer, or give a smaller every"
        )
    if not amount:
        apart = every or max(span // UPDATES, 1)
        return SparsitySchedule(share, first, apart, span // apart)
    return by_amount(share, first, span, every, amount, amount_of)


def by_amount(share: float, begin: int, span: int, every: int, amount: float, amount_of: str) -> SparsitySchedule:
    times = share / amount if amount_of == "all" else log(1 - share) / log(1 - amount)
    updates = max(ceil(times - 1e-9), 1)
    apart = every or span // updates
    if not apart or updates * apart > span:
        raise Mistake(
            f"amount={amount} of {amount_of} weights every {apart or 1} steps: a share of {share} takes {updates} times, "
            f"{updates * (apart or 1)} steps, and {span} lie between begin and end; train longer, give a smaller every or a "
            f"smaller share, or a larger amount"
        )
    return SparsitySchedule(share, begin, apart, updates, amount, amount_of)
