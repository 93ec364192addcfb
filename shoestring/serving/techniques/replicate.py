"""Several processes that answer.

    requests/s  =  count * requests/s of one / slowdown

The slowdown is measured with so many processes at once: they share caches and memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoestring.serving.technique import Deployment, ServingCost, ServingTechnique


@dataclass(frozen=True)
class Replicate(ServingTechnique):
    """So many processes of one thread each take batches from one queue. Torch's weights are in memory once.

    Costs: the memory that a process needs beside weights, and a slowdown of each where they share caches and memory
    bandwidth; both are measured.

    Not for: a machine with one core.
    """

    count: int = 2

    order: ClassVar[int] = 30
    why: ClassVar[str] = "more cores compute"

    @classmethod
    def choices(cls, cost: ServingCost) -> tuple[Replicate, ...]:
        return tuple(cls(count) for count in sorted(cost.evidence.slowdown) if count > 1)

    def refusal(self, cost: ServingCost) -> str:
        if self.count in cost.evidence.slowdown:
            return ""
        return f"{self.count} replicas were not measured on {cost.evidence.cores} cores, but up to {cost.evidence.most_replicas}"

    def changes(self, deployment: Deployment) -> Mapping[str, object]:
        return {"replicas": self.count}
