"""When how many weights are zero: the cubic schedule of gradual pruning.

    s_t = s_f (1 - (1 - (t - t0) / (n dt))^3)        t = t0, t0 + dt, ..., t0 + n dt

Zhu, Gupta 2017, To prune, or not to prune: exploring the efficacy of pruning for model compression, arXiv 1710.01878.
Many weights go early, while there are many to spare, and few late.
"""
from __future__ import annotations

from dataclasses import dataclass

from shoestring.core.errors import Mistake

UPDATES = 100   # of the masks, on the way from none to all, where nobody says how many


@dataclass(frozen=True)
class Schedule:
    """In steps, of which the first is number 1. Masks change when step `begin + i every` begins, and never after that with i = n."""

    share: float   # of the weights that are zero in the end
    begin: int     # t0: the last step with all weights
    every: int     # dt
    updates: int   # n

    @property
    def end(self) -> int:
        """The first step that is trained with the final masks."""
        return self.begin + self.updates * self.every

    def due(self, step: int) -> bool:
        """Whether masks change before this step.

        >>> [step for step in range(1, 12) if Schedule(0.9, begin=2, every=3, updates=2).due(step)]
        [5, 8]
        """
        return self.begin < step <= self.end and not (step - self.begin) % self.every

    def share_at(self, step: int) -> float:
        """The share of zeros in this step.

        >>> [round(Schedule(0.64, begin=10, every=10, updates=4).share_at(step), 3) for step in (10, 20, 29, 30, 40, 50, 90)]
        [0.0, 0.37, 0.37, 0.56, 0.63, 0.64, 0.64]
        """
        update = min(max((step - self.begin) // self.every, 0), self.updates)
        return self.share * (1 - (1 - update / self.updates) ** 3)

    def progress(self, step: int) -> float:
        """How much of the way from begin to end is behind this step, from 0 to 1."""
        return min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)


def scheduled(share: float, steps: int, begin: float, end: float, every: int) -> Schedule:
    """The schedule of a training of so many steps; `begin` and `end` are shares of them, `every` = 0: about a hundred updates.

    >>> scheduled(0.9, steps=1000, begin=0.1, end=0.7, every=0)
    Schedule(share=0.9, begin=100, every=6, updates=100)
    >>> scheduled(0.9, steps=100, begin=0.0, end=1.0, every=7).end
    98
    """
    if not 0 < share < 1:
        raise Mistake(f"share={share}: it is the share of weights that are zero in the end: give more than 0 and less than 1, such as 0.9")
    if not 0 <= begin < end <= 1:
        raise Mistake(f"begin={begin}, end={end}: they are shares of the training's steps: give 0 <= begin < end <= 1, such as 0.1 and 0.7")
    if every < 0:
        raise Mistake(f"every={every}: masks change every so many steps: give 1 or more, or 0 for about {UPDATES} changes in all")
    first, last = int(begin * steps), int(end * steps)
    span = last - first
    if span < max(every, 1):
        raise Mistake(f"{steps} steps, of which {span} lie between begin={begin} and end={end}, and every={every}: no mask would ever "
                      f"change; train longer, or give a smaller every")
    apart = every or max(span // UPDATES, 1)
    return Schedule(share, first, apart, span // apart)
