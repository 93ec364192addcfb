"""Allocations for models with several outputs: the output with the most damage leads.

    damage of output k = factor sum over weights of d_k + base_k         the model's: the largest of them

A knapsack has one damage, so outputs are weighted, p_k, and solved for sum_k p_k d_k; outputs that come out worse weigh more the next time
(multiplicative weights: Arora, Hazan, Kale 2012, doi 10.4086/toc.2012.v008a006). What is taken is the best of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from shoestring.compression.allocate import Allocation, Option, Options, What, fewest_bytes, least_damage, total

REWEIGHTED = 4  # solutions that are tried where there are several outputs


@dataclass(frozen=True)
class OutputSums:
    """How damages of single weights add up to those of outputs."""

    base: tuple[float, ...]  # damage before any weight is stored otherwise
    factor: float = 1.0  # by which damages measured together exceeded their sum

    def damages(self, allocation: Mapping[str, Option[What]]) -> tuple[float, ...]:
        """Of every output."""
        return tuple(
            self.factor * sum(one.damages[place] for one in allocation.values()) + dead
            for place, dead in enumerate(self.base)
        )

    def least(
        self, options: Options[What], most_bytes: float = inf, most_seconds: float = inf
    ) -> Allocation[What] | None:
        """The least damage of the worst output; None if nothing fits."""
        best: Allocation[What] | None = None
        for weights in self.rounds():
            found = least_damage(weighted(options, weights), most_bytes, most_seconds)
            if found is None:
                return best
            now = self.damages(found)
            if best is None or max(now) < max(self.damages(best)):
                best = found
            self.learn(weights, now)
        return best

    def fewest(self, options: Options[What], most_damage: float, most_seconds: float = inf) -> Allocation[What] | None:
        """The fewest bytes with which no output has more damage; None if there are none."""
        single = len(self.base) == 1
        best = (
            None
            if single
            else fewest_bytes(by_worst(options), (most_damage - max(self.base)) / self.factor, most_seconds)
        )
        limit = (most_damage - max(self.base)) / self.factor
        for weights in self.rounds():
            found = fewest_bytes(weighted(options, weights), limit, most_seconds)
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
        return [weights] * (REWEIGHTED if len(self.base) > 1 else 1)  # one list, which is changed in between

    def learn(self, weights: list[float], found: Sequence[float]) -> None:
        """Weigh outputs by how bad they came out; the largest weighs 1."""
        raised = [weight * (one / max(*found, 1e-300)) ** 0.5 for weight, one in zip(weights, found, strict=True)]
        weights[:] = [one / max(*raised, 1e-300) for one in raised]


def weighted(options: Options[What], weights: Sequence[float]) -> dict[str, list[Option[What]]]:
    return {
        name: [
            replace(one, damage=sum(weight * each for weight, each in zip(weights, one.damages, strict=True)))
            for one in some
        ]
        for name, some in options.items()
    }


def by_worst(options: Options[What]) -> dict[str, list[Option[What]]]:
    """Options that count with the output that they damage most: their sum is never less than the worst output's."""
    return {name: [replace(one, damage=max(one.damages)) for one in some] for name, some in options.items()}
