"""The training room: the chooser minimises step time within a process's memory, and confirms plans by rehearsal and, if
needed, trial."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoestring.core.budget import Budget
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity
from shoestring.planning.choose import candidates, requested_candidate
from shoestring.planning.quantities import STEP_SECONDS
from shoestring.planning.room import Room, families
from shoestring.training.conflicts import clash
from shoestring.training.group_technique import GroupTechnique, axes_not_united, mesh_sizes, uniting
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.planning.predict import Combination, Predictor, Techniques, splits
from shoestring.training.planning.savings import costs_more, excess
from shoestring.training.technique import TrainingTechnique

NOISE = 0.03  # relative difference of step times between two plannings of one job; more if timed steps varied more
TRIALS = 2  # real trials of plans whose process follows no rule,
MORE_TRIALS = 6  # or so many if the best plan without a trial is slower by more than
WORTH = 1.2  # this factor
ROOM = 0.7  # fraction of the budget that always fits: two runs differ by up to 15 %, an estimate errs by 10 %


@dataclass
class TrainingRoom(Room[TrainingTechnique, Ledger, TrainingPlan]):
    predictor: Predictor
    catalogue: tuple[type[TrainingTechnique], ...]
    plain: TrainingPlan  # the simplest plan; for a group, data parallelism
    inexact: bool = False  # whether plans may change the result (level `changed`)
    apart: str = ""  # why the workers can't each train a replica; empty if they can
    objective: Quantity = STEP_SECONDS
    fastest_by_rule: float = 0.0  # seconds of the best ranked plan that needs no trial

    idle: ClassVar[float] = ROOM
    good: ClassVar[str] = "fast"
    better: ClassVar[str] = "faster"
    worse: ClassVar[str] = "slower"
    arithmetic: ClassVar[str] = "by the ledger"
    real: ClassVar[str] = "when rehearsed"
    phrases: ClassVar[dict[str, str]] = {"process_bytes": "{} for the whole process", "step_seconds": "{} a step"}

    @property
    def noise(self) -> float:
        """Relative spread of the timed real steps, or how much other processes slowed them down; at least a few
        percent."""
        anchor = self.predictor.evidence.anchor
        return NOISE if anchor is None else max(NOISE, anchor.spread, anchor.busy)

    def confirm(self, one: Combination) -> TrainingPlan:
        return self.predictor.attempt(one)

    def sketch(self, one: Combination) -> TrainingPlan:
        return self.predictor.sketch(one)

    def clash(self, one: TrainingTechnique, other: TrainingTechnique) -> str:
        return clash(one, other)

    def complete(self, techniques: Techniques, cost: Ledger) -> bool:
        return complete(techniques, cost)

    def begin(self, ranked: Sequence[Combination]) -> None:
        self.predictor.trials = 0
        self.fastest_by_rule = next(
            (one.known["step_seconds"] for one in ranked if self.known_by_rule(one)), float("inf")
        )

    def known_by_rule(self, one: Combination) -> bool:
        return not self.predictor.needs_trial(one)

    def worth(self, one: Combination) -> bool:
        """Whether a candidate that needs a trial gets one: while trials are left."""
        anchor = self.predictor.evidence.anchor
        if anchor is None or self.known_by_rule(one):
            return True
        if anchor.sampled:  # a whole step can't run here, so nothing can be tried
            return False
        return self.predictor.trials < (
            MORE_TRIALS if one.known["step_seconds"] * WORTH < self.fastest_by_rule else TRIALS
        )

    def errs_like(self, one: Combination) -> Hashable:
        """Plans whose estimates share an error: the default allocator's kept memory is a guess, and one trial corrects
        all of them."""
        return families(one.techniques) if self.known_by_rule(one) else "needs a trial"

    def confirm_again(self, one: Combination, plan: TrainingPlan, budget: Budget) -> TrainingPlan:
        return plan if self.known_by_rule(one) else self.predictor.with_more_trials(plan, budget)

    def needless(self, plan: TrainingPlan, budget: Budget) -> str:
        """A warning if a plan with memory-saving techniques needs more memory than plain training, and plain training
        fits."""
        fits = not self.apart and not budget.broken_limits(self.plain.numbers())
        return excess(plan, self.plain) if fits and costs_more(plan, self.plain) else ""

    def complete_figures(self, plan: TrainingPlan) -> TrainingPlan:
        if plan.details.ranks or not self.predictor.is_divided(plan.techniques):
            return plan
        self.predictor.limit = inf
        return self.predictor.attempt(requested_candidate(plan.techniques, self.predictor.evidence.ledger))

    def culprit(self, techniques: Techniques) -> frozenset[str]:
        """The family of the one technique that fails alone, or all families together."""
        for technique in techniques if len(techniques) > 1 and self.predictor.devices == 1 else ():
            try:
                self.predictor.rehearsals.log((technique,))
            except Exception:
                return families((technique,))
        return families(techniques)

    def concerns(self, kind: type[TrainingTechnique]) -> bool:
        return self.predictor.devices > 1 or not issubclass(kind, GroupTechnique)  # only groups need uniting

    def why_inexact(self, one: TrainingTechnique, cost: Ledger) -> str:
        return f" ({cost.findings.reasons['mixes samples']})" if splits(one, cost) else ""

    def why_none(self, cost: Ledger) -> str:
        """Why no way of training with these workers may be used."""
        if self.apart:
            return f"this job can't be trained by {self.predictor.devices} workers: {self.apart}"
        level, why = self.plain.exactness, self.why_inexact(self.plain.techniques[0], cost)
        return (
            f"{self.predictor.devices} workers that share a batch train this model{why} to what is {level.word}: {level.meaning}; "
            f"give {level.flag} to allow it, or train with one worker"
        )

    def hint(self) -> str:
        changed = Exactness.CHANGED
        return "" if self.inexact else f"; {changed.flag} allows what is {changed.word}, such as 16-bit precision"


def complete(techniques: Techniques, ledger: Ledger) -> bool:
    """Whether every axis with several workers has a technique that unites them."""
    try:
        sizes = mesh_sizes(techniques, ledger.workers.everybody)
    except Mistake:  # the techniques do not fit this number of workers
        return False
    return not axes_not_united(techniques, sizes) and all(sizes[one.unites] > 1 for one in uniting(techniques))


def combinations(
    ledger: Ledger, catalogue: Iterable[type[TrainingTechnique]], most: Exactness
) -> Iterator[Combination]:
    """All allowed combinations of techniques, costed on a ledger."""
    return candidates(catalogue, ledger, most, clash, complete)
