"""Allocation for models with several outputs: minimise the damage of the worst output.

    damage of output k = factor * (sum over weights of d_k) + base_k         damage of the model = the largest of them

A knapsack has one objective, so it is solved for sum_k p_k d_k with weights p_k. Outputs that come out worse get more
weight in the next round (multiplicative weights: Arora, Hazan, Kale 2012, doi 10.4086/toc.2012.v008a006). The best
round wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from shoestring.compression.allocation.allocate import (
    Allocation,
    Option,
    Options,
    What,
    fewest_bytes,
    least_damage,
    total,
)

REWEIGHTED = 4  # rounds of reweighting if there are several outputs


@dataclass(frozen=True)
class OutputSums:
    """How damages of single weights add up to damages of outputs."""

    base: tuple[float, ...]  # damage of the model before its weights are compressed
    factor: float = 1.0  # measured total damage / sum of single damages

    def damages(self, allocation: Mapping[str, Option[What]]) -> tuple[float, ...]:
        """Predicted damage of every output."""
        return tuple(
            self.factor * sum(one.damages[place] for one in allocation.values()) + base
            for place, base in enumerate(self.base)
        )

    def least(
        self, options: Options[What], most_bytes: float = inf, most_seconds: float = inf
    ) -> Allocation[What] | None:
        """The allocation with the least damage to the worst output; None if nothing fits."""
        best: Allocation[What] | None = None
        for weights in self.rounds():
            found = least_damage(weight_outputs(options, weights), most_bytes, most_seconds)
            if found is None:
                return best
            now = self.damages(found)
            if best is None or max(now) < max(self.damages(best)):
                best = found
            self.learn(weights, now)
        return best

    def fewest(self, options: Options[What], most_damage: float, most_seconds: float = inf) -> Allocation[What] | None:
        """The allocation with the fewest bytes in which no output has more than this damage; None if nothing fits."""
        single = len(self.base) == 1
        best = (
            None
            if single
            else fewest_bytes(by_worst(options), (most_damage - max(self.base)) / self.factor, most_seconds)
        )
        limit = (most_damage - max(self.base)) / self.factor
        for weights in self.rounds():
            found = fewest_bytes(weight_outputs(options, weights), limit, most_seconds)
            if found is None:
                break
            now = self.damages(found)
            if (single or max(now) <= most_damage) and (best is None or total(found)[0] < total(best)[0]):
                best = found
            limit *= max(min(most_damage / max(*now, 1e-300), 2.0), 0.5)
            self.learn(weights, now)
        return best

    def rounds(self) -> list[list[float]]:
        weights = [1.0] * len(self.base)
        return [weights] * (REWEIGHTED if len(self.base) > 1 else 1)  # the same list in each round; `learn` changes it

    def learn(self, weights: list[float], found: Sequence[float]) -> None:
        """Increase the weights of the worse outputs; the largest weight is 1."""
        raised = [weight * (one / max(*found, 1e-300)) ** 0.5 for weight, one in zip(weights, found, strict=True)]
        weights[:] = [one / max(*raised, 1e-300) for one in raised]


def weight_outputs(options: Options[What], weights: Sequence[float]) -> dict[str, list[Option[What]]]:
    return {
        name: [
            replace(one, damage=sum(weight * each for weight, each in zip(weights, one.damages, strict=True)))
            for one in some
        ]
        for name, some in options.items()
    }


def by_worst(options: Options[What]) -> dict[str, list[Option[What]]]:
    """Options whose damage is that to the output they damage most: the sum is an upper bound for the worst output."""
    return {name: [replace(one, damage=max(one.damages)) for one in some] for name, some in options.items()}
