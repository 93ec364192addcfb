"""The planner, shared by all rooms: enumerate the allowed combinations, rank them by arithmetic, confirm the best on
the real subject, explain.

A room supplies a class that inherits from `room.Room`: its catalogue, its objective, and how a candidate is confirmed.
Nothing here knows what a technique does. A cost is only asked for its numbers by name, which a `Budget` limits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Generic

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness
from shoestring.core.technique import text
from shoestring.core.units import limit_text, unit_text
from shoestring.planning.plan import Outcome, Plan, techniques_text
from shoestring.planning.room import TIED, C, Candidate, HasNumbers, P, Room, T, families

NOISE = 0.08  # of the objective: two plans for the same question may differ by this much, because times are measured anew for each
LENIENT = (
    1.03  # a candidate that exceeds the budget by this factor is still confirmed, because arithmetic may overestimate
)
FINALISTS = 10  # candidates that may break the budget when confirmed before the planner gives up
NEAREST = 3  # number of least demanding candidates that are confirmed then
TOLD = 5  # runners-up that are shown
BOUGHT = 3  # plans shown that more budget would buy, each better by STEP than the one before
STEP = 0.05


@dataclass
class Chooser(Generic[T, C, P]):
    """The planner of one room for one subject; it may be asked for several budgets."""

    room: Room[T, C, P]
    cost: C  # of the subject without any technique
    failed: dict[frozenset[str], str] = field(
        default_factory=dict
    )  # families of plans that failed when confirmed, and why

    def best(
        self,
        budget: Budget,
        levels: Sequence[Exactness],
        plain: P,
        known: Sequence[P] = (),
        earlier: tuple[T, ...] | None = None,
    ) -> Outcome[P]:
        """The best plan within a budget. A plan of an earlier level is preferred if it fits, even if a later level has
        a better one.

        `plain`: the plan without techniques, for comparison; it is a candidate if it is among `known`, the plans that
        are already confirmed. `earlier`: the plan chosen when the same was asked before. Raises OverBudget.
        """
        everything = list(self.candidates(levels[-1]))
        if not everything:
            raise Mistake(self.room.why_none(self.cost))
        limited = [one for one in everything if not budget.unknown_limits(one.numbers())]
        if not limited:
            raise Mistake(unknown_text(budget, everything[0]))
        everything = limited
        for level in tiers(everything, levels):
            found = [one for one in everything if one.exactness <= level]
            ranked = best_first(found, budget, self.room.objective.name, self.again(earlier, level), self.room.idle)
            self.room.begin(ranked)
            fitting, passed = self.first_fitting(ranked, budget, known)
            best = fitting if fitting is not None else self.nearest(found, passed, budget, known)
            if not budget.broken_limits(best.numbers()):
                best = self.smaller(best, passed, budget, known)
                return Outcome(
                    best,
                    plain,
                    runners_up=self.runners_up(ranked, best, passed, budget),
                    more=self.more(found, best, budget),
                    refused=self.refusals(level),
                    tried=len(found),
                    fitting=len(ranked),
                    budget=budget,
                )
        raise self.over_budget(found, budget, levels, best)

    def candidates(self, most: Exactness) -> Iterator[Candidate[T, C]]:
        return candidates(self.room.catalogue, self.cost, most, self.room.clash, self.room.complete)

    def again(self, earlier: tuple[T, ...] | None, most: Exactness) -> Candidate[T, C] | None:
        """The earlier choice as a candidate, with the present cost; None if there was none or it is not allowed now."""
        if (
            earlier is None
            or conflict(self.room, earlier)
            or not {type(one) for one in earlier} <= set(self.room.catalogue)
        ):
            return None
        with suppress(Mistake):
            one = requested_candidate(earlier, self.cost)
            return one if one.exactness <= most else None
        return None

    def first_fitting(
        self, ranked: Sequence[Candidate[T, C]], budget: Budget, known: Sequence[P]
    ) -> tuple[P | None, list[tuple[P, str]]]:
        """The first candidate that keeps the budget when confirmed, and those passed over with the reason; "" if they
        broke the budget."""
        passed: list[tuple[P, str]] = []
        off: dict[Hashable, float] = {}  # by how much such candidates exceeded their arithmetic
        for one in ranked:
            alike = self.room.errs_like(one)
            if (
                budget.broken_limits(one.numbers(), 1 / off.get(alike, 1.0))
                or not self.room.worth(one)
                or self.has_failed(one)
            ):
                continue
            plan = next((plan for plan in known if plan.techniques == one.techniques), None) or self.attempt(
                one, passed
            )
            if plan is None:
                continue
            if not budget.broken_limits(plan.numbers()):
                plan = self.room.confirm_again(one, plan, budget)
            if not budget.broken_limits(plan.numbers()):
                if not (reason := self.room.needless(plan, budget)):
                    return plan, passed
                passed.append((plan, reason))
                continue
            off[alike] = max(
                budget.share_used(plan.numbers()) / max(budget.share_used(one.numbers()), 1e-9), off.get(alike, 0.0)
            )
            passed.append((plan, ""))
            if len(passed) > FINALISTS:
                break
        return None, passed

    def attempt(self, one: Candidate[T, C], passed: list[tuple[P, str]]) -> P | None:
        """A confirmed candidate; None if confirming shows that it can't be used, and the reason is noted."""
        try:
            return self.room.confirm(one)
        except Mistake as error:
            passed.append((self.room.sketch(one), str(error)))
            self.failed[self.room.culprit(one.techniques)] = str(error)
            return None

    def has_failed(self, one: Candidate[T, C]) -> bool:
        return bool(self.failed) and any(some <= families(one.techniques) for some in self.failed)

    def nearest(
        self, found: Sequence[Candidate[T, C]], passed: list[tuple[P, str]], budget: Budget, known: Sequence[P]
    ) -> P:
        """The plan that comes closest to the budget, confirmed."""
        least = sorted(
            found, key=lambda one: (budget.share_used(one.numbers()), one.numbers()[self.room.objective.name])
        )
        plans = [plan for plan, why in passed if not why]
        more = len(plans) + NEAREST
        for one in [one for one in least if self.room.known_by_rule(one)] or least:
            if len(plans) == more:
                break
            if not self.has_failed(one) and (plan := self.attempt(one, passed)) is not None:
                plans.append(plan)
        if not plans and not known:
            raise Mistake(next(reversed(self.failed.values()), self.room.why_none(self.cost)))
        return self.room.complete_figures(min((*plans, *known), key=lambda plan: budget.share_used(plan.numbers())))

    def smaller(self, best: P, passed: list[tuple[P, str]], budget: Budget, known: Sequence[P]) -> P:
        """The best plan, or else a known one that needs no more of the budget (or no more than an idle share), is as
        exact, and is slower by no more than noise. The plan that loses is passed over, with the reason."""
        name, noise = self.room.objective.name, self.room.noise
        for plan in known:
            if (
                plan.techniques != best.techniques
                and plan.exactness <= best.exactness
                and not budget.broken_limits(plan.numbers())
                and budget.share_used(plan.numbers()) <= max(budget.share_used(best.numbers()), self.room.idle)
                and plan.numbers()[name] <= best.numbers()[name] * (1 + noise)
            ):
                larger = budget.share_used(plan.numbers()) < budget.share_used(best.numbers())
                passed.append(
                    (
                        best,
                        f"no {self.room.better} than {plan} by more than noise ({noise:.0%}), and "
                        f"{'larger' if larger else 'more techniques where the budget is idle'}",
                    )
                )
                best = plan
        return best

    # Explaining

    def runners_up(
        self, ranked: Sequence[Candidate[T, C]], chosen: P, passed: Sequence[tuple[P, str]], budget: Budget
    ) -> tuple[tuple[P, str], ...]:
        """Candidates that failed, some that broke the budget, and the best of every other combination of families."""
        there = {families(chosen.techniques)} | {families(plan.techniques) for plan, _ in passed}
        told = [(plan, why) for plan, why in passed if why]
        told += [(plan, too_much(self.room, plan, budget)) for plan, why in passed if not why][:3]
        same: HasNumbers = next(
            (one for one in ranked if one.techniques == chosen.techniques), chosen
        )  # by arithmetic too, if it is a candidate
        name = self.room.objective.name
        for one in ranked:
            if (
                families(one.techniques) not in there
                and one.numbers()[name] >= same.numbers()[name]
                and not self.has_failed(one)
            ):
                there.add(families(one.techniques))
                sketch = self.room.sketch(one)
                behind = self.why_behind(one, same.numbers(), len(chosen.techniques), budget)
                told.append((sketch, self.room.needless(sketch, budget) or behind))
            if len(told) >= TOLD:
                break
        return tuple(told)

    def why_behind(self, one: Candidate[T, C], chosen: Mapping[str, float], techniques: int, budget: Budget) -> str:
        """Why a candidate lost against the chosen plan, whose numbers are given."""
        room, name = self.room, self.room.objective.name
        if not chosen[name] and one.numbers()[name] > 0:  # a fraction of zero means nothing
            return f"{room.worse}: {room.objective.text(one.numbers()[name])}"
        behind = one.numbers()[name] / chosen[name] - 1 if chosen[name] else 0.0
        if behind >= 0.005:
            return f"{behind:.0%} {room.worse}"
        if budget.share_used(one.numbers()) > budget.share_used(chosen):
            return f"no {room.better}, and larger"
        return f"no {room.better}, and more techniques" if len(one.techniques) > techniques else f"as {room.good}"

    def more(self, found: Sequence[Candidate[T, C]], chosen: P, budget: Budget) -> tuple[P, ...]:
        """The next better plans that more budget would buy, by arithmetic."""
        name, steps = self.room.objective.name, []
        best = (1 - TIED) * chosen.numbers()[name]
        for one in sorted(found, key=lambda one: budget.share_used(one.numbers())):
            if budget.broken_limits(one.numbers()) and one.numbers()[name] < best and not self.has_failed(one):
                steps.append(self.room.sketch(one))
                best = (1 - STEP) * one.numbers()[name]
        return tuple(steps[:BOUGHT])

    def refusals(self, most: Exactness) -> tuple[tuple[str, str], ...]:
        """Techniques that can't be used with any setting, and why."""
        found = []
        for kind in filter(self.room.concerns, self.room.catalogue):
            reasons = [
                one.refusal(self.cost) or self.too_inexact(one, most) for one in kind.settings_to_explain(self.cost)
            ]
            if reasons and all(reasons):
                found.append((kind.__name__, reasons[0]))
        return tuple(found)

    def too_inexact(self, one: T, most: Exactness) -> str:
        level = one.exactness(self.cost)
        if level <= most:
            return ""
        return f"{level.word} for {self.room.subject}{self.room.why_inexact(one, self.cost)}: {level.flag} allows it"

    def over_budget(
        self, found: Sequence[Candidate[T, C]], budget: Budget, levels: Sequence[Exactness], nearest: P
    ) -> OverBudget:
        """The error for an impossible budget, with the nearest plan and what inexact levels would save."""
        hint = "".join(
            self.bought(level, nearest, budget) for level in Exactness if levels[-1] < level < Exactness.CHANGED
        )
        limits = " and ".join(
            limit_text(limit.value, limit.unit, True) if limit.least else unit_text(limit.value, limit.unit)
            for limit in budget.limits()
        )
        return OverBudget(
            f"nothing fits {limits}: {len(found):,} combinations were tried and the least that works is "
            f"{self.needs_text(nearest, budget, self.room.phrases)}, with {nearest} "
            f"({nearest.exactness.word}, {self.objective_text(nearest)}){hint}{self.room.hint()}",
            nearest,
        )

    def bought(self, level: Exactness, nearest: P, budget: Budget) -> str:
        """What plans of a further level would need, by arithmetic; empty if that is no less."""
        there = (one for one in self.candidates(level) if one.exactness == level)
        least = min(there, key=lambda one: budget.share_used(one.numbers()), default=None)
        if least is None or budget.share_used(least.numbers()) >= budget.share_used(nearest.numbers()):
            return ""
        return (
            f"; {level.flag} ({level.word}) allows {self.room.sketch(least)}, which needs {self.needs_text(least, budget, {})} "
            f"{self.room.arithmetic} ({self.objective_text(least)})"
        )

    def needs_text(self, one: HasNumbers, budget: Budget, phrases: Mapping[str, str]) -> str:
        """What it needs of each limited figure, rounded so that it can be given as a limit."""
        numbers = one.numbers()
        return " and ".join(
            phrases.get(limit.figure, "{}").format(limit_text(numbers[limit.figure], limit.unit, limit.least))
            for limit in budget.limits()
            if limit.figure in numbers
        )

    def objective_text(self, one: HasNumbers) -> str:
        objective = self.room.objective
        return self.room.phrases.get(objective.name, f"{objective.label} {{}}").format(
            objective.text(one.numbers()[objective.name])
        )


def candidates(
    catalogue: Iterable[type[T]],
    cost: C,
    most: Exactness,
    clash: Callable[[T, T], str],
    complete: Callable[[tuple[T, ...], C], bool],
) -> Iterator[Candidate[T, C]]:
    """All allowed combinations up to an inexactness; each cost is computed from the one it extends."""
    rows = sorted(catalogue, key=lambda kind: kind.order)

    def below(start: int, chosen: tuple[T, ...], now: C, level: Exactness) -> Iterator[Candidate[T, C]]:
        if complete(chosen, now):
            yield Candidate(chosen, now, level, now.numbers())
        for row in range(start, len(rows)):
            for choice in rows[row].choices(now):
                closeness = max(level, choice.exactness(now))
                if closeness <= most and not any(clash(one, choice) for one in chosen) and not choice.refusal(now):
                    yield from below(row + 1, (*chosen, choice), choice.cost(now), closeness)

    return below(0, (), cost, Exactness.BITS)


def best_first(
    found: Iterable[Candidate[T, C]],
    budget: Budget,
    objective: str,
    earlier: Candidate[T, C] | None = None,
    idle: float = 0.0,
) -> list[Candidate[T, C]]:
    """Candidates that keep the budget by arithmetic, best first. Among equally good ones: the more exact, then the
    smaller (by a percent of the budget), then the simpler. Below the `idle` share of the budget none counts as smaller,
    because saving there has no use.

    Wherever the line between equal and worse is drawn, some plan lies on it and noise moves it across, so no ordering
    of one ranking's numbers alone always gives the same plan. Therefore the plan chosen `earlier` stays first, unless
    it is worse by more than noise, or the best one is the same with fewer techniques and saving memory has no use.
    """
    fitting = [one for one in found if not budget.broken_limits(one.numbers(), LENIENT)]
    best = min((one.numbers()[objective] for one in fitting), default=0.0)

    def rank(one: Candidate[T, C]) -> tuple[object, ...]:
        behind, used = (one.numbers()[objective] - best) / max(best, 1e-9), budget.share_used(one.numbers())
        taken = round(max(used / LENIENT, idle), 2)
        return 0.0 if behind <= TIED else round(behind, 2), one.exactness, taken, len(one.techniques), used

    ranked = sorted(fitting, key=rank)
    if earlier is None or budget.broken_limits(earlier.numbers(), LENIENT):
        return ranked
    needless = (
        ranked
        and budget.share_used(ranked[0].numbers()) <= idle
        and set(ranked[0].techniques) < set(earlier.techniques)
    )
    if earlier.numbers()[objective] <= best * (1 + NOISE) and not needless:
        ranked = [earlier, *(one for one in ranked if one.techniques != earlier.techniques)]
    return ranked


def tiers(found: Iterable[Candidate[T, C]], levels: Sequence[Exactness]) -> list[Exactness]:
    """The allowed levels that add a candidate to those of the levels before."""
    there = {one.exactness for one in found}
    return [
        level
        for before, level in zip((-1, *levels), levels, strict=False)
        if any(before < one <= level for one in there)
    ]


def requested_candidate(techniques: tuple[T, ...], cost: C) -> Candidate[T, C]:
    """The techniques that the user named, in their order, as a candidate; refused with the reason if one can't be used."""
    now, level = cost, Exactness.BITS
    for technique in techniques:
        if reason := technique.refusal(now):
            raise Mistake(f"{text(technique)} can't be used for this job: {reason}")
        level, now = max(level, technique.exactness(now)), technique.cost(now)
    return Candidate(techniques, now, level, now.numbers())


def conflict(room: Room[T, Any, Any], techniques: Iterable[T]) -> str:
    """Why these techniques can't be combined; empty if they can."""
    return next(filter(None, (room.clash(one, other) for one, other in combinations(techniques, 2))), "")


def unknown_text(budget: Budget, one: HasNumbers) -> str:
    """Why a budget can't be kept where costs lack figures for its limits."""
    lacking = " and ".join(f"{limit.name} ({limit.figure})" for limit in budget.unknown_limits(one.numbers()))
    return (
        f"nothing here has a figure for the limit on {lacking}, so nobody could tell whether it is kept: leave it out"
    )


def too_much(room: Room[Any, Any, Any], plan: Plan[Any, Any], budget: Budget) -> str:
    """By how much a plan breaks the budget, as text."""
    return " and ".join(
        f"needs {unit_text(one.found, one.limit.unit)} {room.real}, "
        f"{unit_text(abs(one.found - one.limit.value), one.limit.unit)} too {'little' if one.limit.least else 'much'}"
        for one in budget.broken_limits(plan.numbers())
    )


def best_or_asked(
    chooser: Chooser[T, C, P],
    budget: Budget,
    plain: P,
    techniques: tuple[T, ...] | None,
    levels: Sequence[Exactness] = (Exactness.CHANGED,),
) -> Outcome[P]:
    """The best plan within the budget, or exactly the named techniques. Raises OverBudget if none keeps it."""
    room = chooser.room
    if techniques is None:
        return chooser.best(budget, levels, plain, known=(plain,))
    if reason := conflict(room, techniques):
        raise Mistake(f"{techniques_text(techniques)} can't be combined: {reason}")
    one = requested_candidate(techniques, chooser.cost)
    if budget.unknown_limits(one.numbers()):
        raise Mistake(unknown_text(budget, one))
    chosen = room.confirm(one)
    if broken := budget.broken_limits(chosen.numbers()):
        raise OverBudget(
            f"{chosen} does not keep the budget: {'; '.join(map(str, broken))}; leave --use out to let shoestring choose",
            chosen,
        )
    return Outcome(chosen, plain, asked=True, budget=budget)
