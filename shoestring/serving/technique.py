"""The interface of serving techniques: `apply` changes a `Deployment`, `cost` changes a `ServingCost`.

The plain server computes each request alone, in one process, with torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoestring.core.budget import Budget
from shoestring.core.technique import Technique
from shoestring.serving.batching.policy import Batching
from shoestring.serving.measuring.evidence import TORCH, EngineEvidence, ServingEvidence
from shoestring.serving.measuring.service_time import ServiceTime
from shoestring.serving.simulate import Servers, capacity, most_rate, percentile, waits

ALONE = Batching(tokens=1)  # each request is a batch
USUAL_LOAD = 0.6  # of the capacity: at which a latency is told where no rate and no target is asked for


@dataclass(frozen=True)
class Deployment:
    """How a model is served."""

    engine: str = TORCH
    batching: Batching = ALONE
    replicas: int = 1


@dataclass(frozen=True)
class ServingCost:
    """What a deployment costs: it is simulated with what was measured of its parts."""

    evidence: ServingEvidence = field(repr=False)
    budget: Budget
    deployment: Deployment = Deployment()

    @property
    def engine(self) -> EngineEvidence:
        return self.evidence.engines[self.deployment.engine]

    @property
    def time(self) -> ServiceTime:
        """Of a batch, while all replicas compute."""
        one, known = self.deployment, self.engine
        packed = known.packed if one.batching.packed else None
        return (packed or known.padded).slower(self.evidence.slowdown[one.replicas])

    @cached_property
    def servers(self) -> Servers:
        """Replicas share the cores with the process that listens: what that takes of a core, they are slower by."""
        one, front = self.deployment, self.evidence.front_seconds
        alone = Servers(self.time, one.batching, one.replicas)
        spare = max(self.evidence.cores - one.replicas, 0)  # cores that no replica needs
        asked = capacity(alone, self.evidence.lengths) * front
        crowded = 1 + max(asked - spare, 0.0) / one.replicas
        return replace(alone, time=self.time.slower(crowded), overhead=front)

    @cached_property
    def capacity(self) -> float:
        """Requests per second, at most."""
        return capacity(self.servers, self.evidence.lengths)

    @cached_property
    def rate(self) -> float:
        """Requests per second at which the latency is told: what is asked for; else as many as keep the target; else a usual load."""
        if self.budget.throughput is not None:
            return self.budget.throughput
        if self.budget.latency is not None:
            return self.most_rate
        return USUAL_LOAD * self.capacity

    @cached_property
    def most_rate(self) -> float:
        """Requests per second that keep the latency that is asked for; without one, the capacity."""
        if self.budget.latency is None:
            return self.capacity
        return most_rate(self.servers, self.evidence.lengths, self.budget.latency, self.budget.percentile)

    def latency(self, rate: float, share: float) -> float:
        """Seconds to an answer at a rate, at a percentile."""
        return percentile(waits(self.servers, self.evidence.lengths, rate), share)

    @cached_property
    def known_figures(self) -> Mapping[str, float]:
        one, known = self.deployment, self.engine
        alone = self.servers.time.seconds([max(self.evidence.lengths)]) + self.servers.overhead
        return {
            "process_bytes": self.evidence.front_bytes + known.shared_bytes + one.replicas * known.replica_bytes,
            "size_bytes": known.size_bytes,
            "quality": known.quality,
            "requests_per_second": self.most_rate,
            "seconds_per_request": 1 / (self.most_rate or self.capacity),
            "latency_seconds": self.latency(self.rate, self.budget.percentile) if self.rate else alone,
        }

    def numbers(self) -> Mapping[str, float]:
        return self.known_figures


class ServingTechnique(Technique[Deployment, ServingCost], ABC):
    """Changes one field of the deployment; the cost follows from that."""

    def apply(self, deployment: Deployment) -> Deployment:
        return replace(deployment, **self.changes(deployment))  # type: ignore[arg-type]

    def cost(self, cost: ServingCost) -> ServingCost:
        return replace(cost, deployment=self.apply(cost.deployment))

    @abstractmethod
    def changes(self, deployment: Deployment) -> Mapping[str, object]:
        """The fields of a deployment that it changes."""
