"""The federated room: its catalogue and objective, and how candidates are confirmed by real work of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from shoestring.core.budget import Budget
from shoestring.core.clients.statistics import StatisticsRule
from shoestring.core.errors import Mistake
from shoestring.core.figures import Quantity
from shoestring.core.technique import applied, in_order
from shoestring.federated.catalogue import CATALOGUE, clash, incomplete_reason
from shoestring.federated.planning.available import AvailableTechniques, available_techniques
from shoestring.federated.planning.evidence import UpdateEvidence, clear_caches
from shoestring.federated.planning.prepare import Prepared, plain_cost
from shoestring.federated.round import DeviceGroup, DeviceView, Objective, Order, Updates
from shoestring.federated.simulation.cohort import MethodChoice, MethodDiffers, sequential_choice
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.release import NORM_OF_DEVICES, NOT_OURS, SHOWN_EXACTLY, noise_of
from shoestring.planning.choose import Chooser, best_or_asked, requested_candidate
from shoestring.planning.plan import Outcome, Plan
from shoestring.planning.room import Candidate, Room

ERROR = Quantity("error", "error of a round's update", "share")
MUCH = 1.0  # an error of a round's update this large causes a warning: as large as the update itself


@dataclass(frozen=True)
class FederationDetails:
    """A federation's own part of its plan."""

    how: MethodChoice  # how devices are simulated,
    processes: int = 1  # and in how many processes
    clients: int = 0  # number of clients
    per_round: int = 0
    rounds: int = 0
    statistics: StatisticsRule | None = None  # what happens to norm layers' running statistics; None: there are none
    private: bool | None = None  # False: the noise follows from a seed; None: no noise


FederatedPlan = Plan[FederatedTechnique, FederationDetails]
FederatedOutcome = Outcome[FederatedPlan]


def details_of(given: Prepared) -> FederationDetails:
    return FederationDetails(
        given.how,
        given.processes,
        given.population.count,
        given.population.per_round,
        given.rounds,
        given.statistics if given.layout.statistics.size else None,
        given.randomness.secret if given.asked.epsilon is not None else None,
    )


def doubt(plan: FederatedPlan) -> str:
    """A warning if little may be learned; empty if nothing suggests that."""
    error = plan.predicted.get("error", 0.0)
    return (
        f"what comes out of a round is expected to be off by {error:.2g} times what devices find (squared), so little may be "
        f"learned: more devices a round, fewer rounds or larger budgets would help"
        + ", and so would a model of fewer weights, because each of them has noise"
        * (noise_of(plan.techniques) is not None)
    ) * (error >= MUCH)


class FederatedRoom(Room[FederatedTechnique, RoundCost, FederatedPlan]):
    catalogue = CATALOGUE
    objective = ERROR
    good: ClassVar[str] = "exact"
    better: ClassVar[str] = "more exact"
    worse: ClassVar[str] = "more error"
    real: ClassVar[str] = "when a device's update is really sent"
    subject: ClassVar[str] = "this federation"
    phrases: ClassVar[Mapping[str, str]] = {
        "up_bytes": "{} up",
        "down_bytes": "{} down",
        "epsilon": "epsilon {}",
        "error": "error {}",
    }

    def __init__(
        self, given: Prepared, plain: RoundCost, catalogue: tuple[type[FederatedTechnique], ...] = CATALOGUE
    ) -> None:
        assert plain.evidence is not None, "the plain cost has some"
        self.catalogue, self.statistics = catalogue, plain.statistics
        self.given, self.evidence = (
            given,
            plain.evidence,
        )  # as measured on devices, because the costs of techniques have changed theirs

    def sketch(self, one: Candidate[FederatedTechnique, RoundCost]) -> FederatedPlan:
        return FederatedPlan(one.techniques, one.exactness, one.known, details_of(self.given))

    def confirm(self, one: Candidate[FederatedTechnique, RoundCost]) -> FederatedPlan:
        """The candidate, with the bytes that a device really receives and sends under these techniques."""
        up, down = traffic(self.given, one.techniques, self.evidence)
        plan = self.sketch(one).predicting(up_bytes=up, down_bytes=down)
        return replace(plan, warnings=tuple(filter(None, (*self.given.warnings, doubt(plan)))))

    def clash(self, one: FederatedTechnique, other: FederatedTechnique) -> str:
        return clash(one, other)

    def complete(self, techniques: tuple[FederatedTechnique, ...], cost: RoundCost) -> bool:
        return not incomplete_reason(techniques)

    def hint(self) -> str:
        found = ""
        if self.given.asked.epsilon is not None:
            found += "; fewer rounds, fewer clients per round or more clients spend less epsilon"
        if self.statistics and (self.given.asked.upload or self.given.asked.download):
            found += (
                f"; {4 * self.statistics:,} B each way are statistics of norm layers, which no technique compresses: "
                f"--statistics local or --statistics frozen sends none"
            )
        return found

    def concerns(self, kind: type[FederatedTechnique]) -> bool:
        """Only techniques that the planner may choose by itself."""
        return kind.seam in ("send", "private")


def traffic(given: Prepared, techniques: Sequence[FederatedTechnique], evidence: UpdateEvidence) -> tuple[int, int]:
    """Bytes that one device sends and receives, with a measured update."""

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        import torch

        whole = torch.cat([evidence.exact[0], torch.zeros(given.layout.size - given.layout.trained_count)])
        rows = whole.repeat(len(devices), 1)
        return Updates(
            tuple(one.name for one in devices),
            rows,
            torch.ones(len(devices), dtype=torch.float64),
            torch.ones(len(devices), dtype=torch.float64),
        )

    parts = applied(techniques, given.round(work))
    server = parts.begin(given.server(parts), given.population)
    device = DeviceView(given.sample[0].records)
    order = parts.order(server, DeviceGroup((device.name,)))
    sent = parts.encode(order, (device,), parts.work(order, (device,), Objective(given.job.local)))
    return sent.bytes, order.bytes


class PlannedFederation(NamedTuple):
    outcome: FederatedOutcome
    given: Prepared  # as prepared, or with another simulation method if planning found that necessary


def plan_federation(
    given: Prepared, budget: Budget, use: Sequence[str] | None = None, offers: AvailableTechniques | None = None
) -> PlannedFederation:
    """The plan with the least error within the budget, or exactly the requested techniques."""
    offers = offers or available_techniques()
    techniques = None if use is None else in_order(map(offers.parse, use))
    if techniques is not None and (reason := incomplete_reason(techniques)):
        raise Mistake(reason)
    try:
        try:
            cost = plain_cost(given)
        except MethodDiffers as why:  # they work in earnest for the first time
            given = replace(given, how=sequential_choice(given.how, given.may_tell(str(why))))
            cost = plain_cost(given)
        cost = replace(cost, upload=budget.up or 0)
        room = FederatedRoom(given, cost, offers.kinds)
        plain = room.confirm(requested_candidate((), cost))
        outcome = best_or_asked(Chooser(room, cost), budget, plain, techniques)
        if given.asked.epsilon is not None:
            chosen = outcome.chosen
            unknown = [type(one).__name__ for one in chosen.techniques if type(one) not in CATALOGUE]
            warnings = (
                *chosen.warnings,
                SHOWN_EXACTLY,
                *(NORM_OF_DEVICES,) * (techniques is None),
                *map(NOT_OURS.format, unknown),
            )
            outcome = replace(outcome, chosen=replace(chosen, warnings=warnings))
        return PlannedFederation(outcome, given)
    finally:
        clear_caches()
