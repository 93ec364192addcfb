"""The federated room: what the chooser chooses among, and how a candidate is confirmed by devices' real work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity
from shoestring.core.technique import applied, described, in_order
from shoestring.federated.available import AvailableTechniques, available_techniques
from shoestring.federated.catalogue import CATALOGUE, clash, incomplete_reason
from shoestring.federated.evidence import UpdateEvidence, clear_caches
from shoestring.federated.prepare import Prepared, plain_cost
from shoestring.federated.round import DeviceGroup, DeviceView, Objective, Order, Updates
from shoestring.federated.simulation.cohort import MethodDiffers, sequential_choice
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.planning.choose import Choice, Chooser, asked_for, conflict
from shoestring.planning.room import Candidate, Room, named

ERROR = Quantity("error", "error of a round's update", "share")
MUCH = 1.0  # error of a round's update from which on it is worth a word: as large as the update itself


@dataclass(frozen=True)
class FederatedPlan:
    """Techniques of a round in their order, and the figures that they lead to."""

    techniques: tuple[FederatedTechnique, ...]
    exactness: Exactness
    known: Mapping[str, float]

    def numbers(self) -> Mapping[str, float]:
        return self.known

    def as_json(self) -> dict[str, Any]:
        told = [described(one) | {"why": one.why} for one in self.techniques]
        return {
            "techniques": told,
            "exactness": self.exactness.word,
            **{name: finite(value) for name, value in self.known.items()},
        }

    @property
    def doubt(self) -> str:
        """Why little may be learned; empty if nothing speaks against it."""
        error = self.known.get("error", 0.0)
        return (
            f"what comes out of a round is expected to be off by {error:.2g} times what devices find (squared), so little may be "
            f"learned: more devices a round, fewer rounds or larger budgets would help"
        ) * (error >= MUCH)

    def __str__(self) -> str:
        return named(self.techniques)


def finite(value: float) -> float | None:
    return value if value != float("inf") else None


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
        )  # as a device found it: techniques' costs have what they made of it

    def sketched(self, one: Candidate[FederatedTechnique, RoundCost]) -> FederatedPlan:
        return FederatedPlan(one.techniques, one.exactness, one.known)

    def confirmed(self, one: Candidate[FederatedTechnique, RoundCost]) -> FederatedPlan:
        """What a device that really works under these techniques is given and sends."""
        up, down = traffic(self.given, one.techniques, self.evidence)
        return FederatedPlan(one.techniques, one.exactness, {**one.known, "up_bytes": up, "down_bytes": down})

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
        """Only what the chooser may choose by itself is worth a word."""
        return kind.seam in ("send", "private")


def traffic(given: Prepared, techniques: Sequence[FederatedTechnique], evidence: UpdateEvidence) -> tuple[int, int]:
    """Bytes that one device sends and is given, with its update as it was really found."""

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        import torch

        whole = torch.cat([evidence.exact[0], torch.zeros(given.layout.size - given.layout.trained)])
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


@dataclass(frozen=True)
class FederatedOutcome:
    chosen: FederatedPlan
    plain: FederatedPlan
    choice: Choice[FederatedPlan] | None  # None: the techniques were given
    given: Prepared

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "chosen": self.chosen.as_json(),
            "plain": self.plain.as_json(),
            "how": vars(self.given.how) | {"processes": self.given.processes},
            "clients": self.given.population.count,
            "per_round": self.given.population.per_round,
            "rounds": self.given.rounds,
            "statistics": self.given.statistics.value if self.given.layout.statistics.size else None,
        }
        if self.choice is not None:
            told |= {
                "tried": self.choice.tried,
                "fitting": self.choice.fitting,
                "runners_up": [
                    plan.as_json() | {"lost": why, "text": str(plan)} for plan, why in self.choice.runners_up
                ],
                "more": [plan.as_json() for plan in self.choice.more],
                "refused": [{"technique": name, "reason": why} for name, why in self.choice.refused],
            }
        return told


def planned(
    given: Prepared, budget: Budget, use: Sequence[str] | None = None, offers: AvailableTechniques | None = None
) -> FederatedOutcome:
    """The plan with the least error within the budget, or exactly the techniques that are asked for."""
    try:
        return chosen_plan(given, budget, use, offers or available_techniques())
    finally:
        clear_caches()


def chosen_plan(
    given: Prepared, budget: Budget, use: Sequence[str] | None, offers: AvailableTechniques
) -> FederatedOutcome:
    try:
        cost = plain_cost(given)
    except MethodDiffers as why:  # they work in earnest for the first time
        given = replace(given, how=sequential_choice(given.how, str(why)))
        cost = plain_cost(given)
    cost = replace(cost, upload=budget.up or 0)
    room = FederatedRoom(given, cost, offers.kinds)
    plain = room.confirmed(asked_for((), cost))
    if use is None:
        choice = Chooser(room, cost).choice(budget, (Exactness.CHANGED,), known=(plain,))
        return FederatedOutcome(choice.chosen, plain, choice, given)
    techniques = in_order(map(offers.parse, use))
    if reason := conflict(room, techniques):
        raise Mistake(f"{named(techniques)} can't be combined: {reason}")
    if reason := incomplete_reason(techniques):
        raise Mistake(reason)
    chosen = room.confirmed(asked_for(techniques, cost))
    if broken := budget.broken(chosen.numbers()):
        raise_over(chosen, broken)
    return FederatedOutcome(chosen, plain, None, given)


def raise_over(chosen: FederatedPlan, broken: Sequence[object]) -> None:
    from shoestring.core.errors import OverBudget

    raise OverBudget(
        f"{chosen} does not keep the budget: {'; '.join(map(str, broken))}; leave --use out to let shoestring choose",
        chosen,
    )
