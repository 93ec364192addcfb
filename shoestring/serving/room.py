"""The serving room: what the chooser chooses among, and how its cost is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from shoestring.core.figures import Quantity
from shoestring.core.technique import applied, in_order, parse_technique
from shoestring.planning.choose import Chooser, best_or_asked, requested_candidate
from shoestring.planning.plan import Outcome, Plan
from shoestring.planning.room import Candidate, Room
from shoestring.serving.catalogue import CATALOGUE, CONFLICTS
from shoestring.serving.measuring.service_time import ServiceTime
from shoestring.serving.technique import Deployment, ServingCost, ServingTechnique

RATE = Quantity("requests_per_second", "at most", "requests/s")
QUANTITIES = (
    Quantity("process_bytes", "processes"),
    Quantity("latency_seconds", "an answer", "seconds"),
    RATE,
    Quantity("size_bytes", "size"),
    Quantity("quality", "fidelity", "share"),
)
PER_REQUEST = Quantity("seconds_per_request", "a request", "seconds")
LOADS = (0.3, 0.6, 0.9)  # of the capacity, at which latencies are predicted
PERCENTILES = (0.5, 0.99)


@dataclass(frozen=True)
class LoadPoint:
    """Latency at a load."""

    requests_per_second: float
    share: float  # percentile
    seconds: float


@dataclass(frozen=True)
class ServingDetails:
    """What serving adds to a plan: what the server is told, and what it is predicted to do under load."""

    engine: str
    replicas: int
    tokens: int
    packed: bool
    capacity: float  # requests per second
    time: ServiceTime  # of a batch
    longest: int  # length of a request
    loads: tuple[LoadPoint, ...] = field(default=(), compare=False)


ServingPlan = Plan[ServingTechnique, ServingDetails]
ServingOutcome = Outcome[ServingPlan]
BASIS = "simulated from measured batches; memory and what HTTP takes of a request are estimates"


class ServingRoom(Room[ServingTechnique, ServingCost, ServingPlan]):
    catalogue = CATALOGUE
    objective = PER_REQUEST
    good: ClassVar[str] = "fast"
    better: ClassVar[str] = "faster"
    worse: ClassVar[str] = "slower"
    arithmetic: ClassVar[str] = "by simulation"
    real: ClassVar[str] = "by simulation"
    phrases: ClassVar[Mapping[str, str]] = {
        "process_bytes": "{} of memory",
        "latency_seconds": "{} an answer",
        "requests_per_second": "{}",
        "size_bytes": "{}",
        "quality": "fidelity {}",
        "seconds_per_request": "{} a request",
    }

    def __init__(self, catalogue: Sequence[type[ServingTechnique]] = CATALOGUE) -> None:
        self.catalogue = tuple(catalogue)

    def clash(self, one: ServingTechnique, other: ServingTechnique) -> str:
        named = frozenset((type(one).__name__, type(other).__name__))
        return CONFLICTS.get(named, "") or super().clash(one, other)

    def sketch(self, one: Candidate[ServingTechnique, ServingCost]) -> ServingPlan:
        return ServingPlan(one.techniques, one.exactness, one.known, details_of(one.cost), BASIS)

    def confirm(self, one: Candidate[ServingTechnique, ServingCost]) -> ServingPlan:
        """The sketch: no candidate is started, its queue is simulated with what was measured of batches."""
        return self.sketch(one)


def details_of(cost: ServingCost) -> ServingDetails:
    one = cost.deployment
    loads = tuple(
        LoadPoint(load * cost.capacity, share, cost.latency(load * cost.capacity, share))
        for load in LOADS
        for share in PERCENTILES
    )
    return ServingDetails(
        one.engine,
        one.replicas,
        one.batching.tokens,
        one.batching.packed,
        cost.capacity,
        cost.servers.time,
        max(cost.evidence.lengths),
        loads,
    )


def deployment_of(plan: ServingPlan) -> Deployment:
    return applied(plan.techniques, Deployment())


def plan_serving(
    cost: ServingCost,
    use: Sequence[str | ServingTechnique] | None = None,
    catalogue: Sequence[type[ServingTechnique]] = CATALOGUE,
) -> ServingOutcome:
    """The best deployment within the budget, or exactly the techniques that are asked for. Raises OverBudget with the nearest."""
    room = ServingRoom(catalogue)
    plain = room.confirm(requested_candidate((), cost))
    techniques = None
    if use is not None:
        techniques = in_order(parse_technique(one, catalogue) if isinstance(one, str) else one for one in use)
    return best_or_asked(Chooser(room, cost), cost.budget, plain, techniques)
