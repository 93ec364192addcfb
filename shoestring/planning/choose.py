"""One way to choose, for every room: enumerate what is allowed, rank it by arithmetic, confirm the best by the real thing, explain.

A room says what is its own by a class that inherits from `room.Room`: its catalogue, what counts as better, and how a
candidate is confirmed. All the rest is here. Nothing here knows what a technique does, and a cost is only asked for its
numbers by name, on which a `Budget` has its limits.
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
from shoestring.planning.plan import Outcome, Plan, named
from shoestring.planning.room import TIED, C, Candidate, HasNumbers, P, Room, T, families

NOISE = 0.08  # of the objective: so much two choices for the same question may differ, because times are measured anew for each
LENIENT = 1.03  # a candidate may exceed the budget by this factor and still be confirmed: arithmetic may be too careful
FINALISTS = 10  # candidates that break the budget when confirmed, before we say that none keeps it
NEAREST = 3  # of the least demanding candidates that are confirmed then
TOLD = 5  # runners-up
BOUGHT = 3  # plans that more budget would buy, each better by STEP than the one before
STEP = 0.05


@dataclass
class Chooser(Generic[T, C, P]):
    """Choices of a room for one subject, for several budgets if need be."""

    room: Room[T, C, P]
    cost: C  # of the subject without any technique
    failed: dict[frozenset[str], str] = field(
        default_factory=dict
    )  # families of plans that failed when confirmed, and how

    def best(
        self,
        budget: Budget,
        levels: Sequence[Exactness],
        plain: P,
        known: Sequence[P] = (),
        earlier: tuple[T, ...] | None = None,
    ) -> Outcome[P]:
        """The best plan within a budget. A plan of an earlier level is taken if it fits, even if a later level has a better one.

        `plain`: without techniques, to compare with; it is a candidate if it is among the `known`, the plans that are confirmed
        already. `earlier`: the choice when the same was asked before. Raises OverBudget.
        """
        everything = list(self.candidates(levels[-1]))
        if not everything:
            raise Mistake(self.room.why_none(self.cost))
        for level in tiers(everything, levels):
            found = [one for one in everything if one.exactness <= level]
            ranked = best_first(found, budget, self.room.objective.name, self.again(earlier, level), self.room.idle)
            self.room.begin(ranked)
            fitting, passed = self.first_fitting(ranked, budget, known)
            best = fitting if fitting is not None else self.nearest(found, passed, budget, known)
            if not budget.broken(best.numbers()):
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
        """What was chosen earlier, by this cost; none if there was nothing, or it is not allowed now."""
        if (
            earlier is None
            or conflict(self.room, earlier)
            or not {type(one) for one in earlier} <= set(self.room.catalogue)
        ):
            return None
        with suppress(Mistake):
            one = asked_for(earlier, self.cost)
            return one if one.exactness <= most else None
        return None

    def first_fitting(
        self, ranked: Sequence[Candidate[T, C]], budget: Budget, known: Sequence[P]
    ) -> tuple[P | None, list[tuple[P, str]]]:
        """The first candidate that keeps the budget when confirmed; and those passed over, with how they failed, "" if they broke it."""
        passed: list[tuple[P, str]] = []
        off: dict[Hashable, float] = {}  # how much more than by arithmetic such candidates took
        for one in ranked:
            alike = self.room.errs_like(one)
            if (
                budget.broken(one.numbers(), 1 / off.get(alike, 1.0))
                or not self.room.worth(one)
                or self.has_failed(one)
            ):
                continue
            plan = next((plan for plan in known if plan.techniques == one.techniques), None) or self.attempt(
                one, passed
            )
            if plan is None:
                continue
            if not budget.broken(plan.numbers()):
                plan = self.room.confirm_again(one, plan, budget)
            if not budget.broken(plan.numbers()):
                if not (reason := self.room.needless(plan, budget)):
                    return plan, passed
                passed.append((plan, reason))
                continue
            off[alike] = max(budget.used(plan.numbers()) / max(budget.used(one.numbers()), 1e-9), off.get(alike, 0.0))
            passed.append((plan, ""))
            if len(passed) > FINALISTS:
                break
        return None, passed

    def attempt(self, one: Candidate[T, C], passed: list[tuple[P, str]]) -> P | None:
        """A candidate, confirmed; none if only that shows that it can't be used, which is noted."""
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
        """The least demanding plan there is, confirmed."""
        least = sorted(found, key=lambda one: (budget.used(one.numbers()), one.numbers()[self.room.objective.name]))
        plans = [plan for plan, why in passed if not why]
        more = len(plans) + NEAREST
        for one in [one for one in least if self.room.known_by_rule(one)] or least:
            if len(plans) == more:
                break
            if not self.has_failed(one) and (plan := self.attempt(one, passed)) is not None:
                plans.append(plan)
        if not plans and not known:
            raise Mistake(next(reversed(self.failed.values()), self.room.why_none(self.cost)))
        return self.room.complete_figures(min((*plans, *known), key=lambda plan: budget.used(plan.numbers())))

    def smaller(self, best: P, passed: list[tuple[P, str]], budget: Budget, known: Sequence[P]) -> P:
        """The best plan, or a known one that takes no more of the budget, or an idle share of it, is as exact, and is not worse by more
        than noise: the other is then passed over, with the reason."""
        name, noise = self.room.objective.name, self.room.noise
        for plan in known:
            if (
                plan.techniques != best.techniques
                and plan.exactness <= best.exactness
                and not budget.broken(plan.numbers())
                and budget.used(plan.numbers()) <= max(budget.used(best.numbers()), self.room.idle)
                and plan.numbers()[name] <= best.numbers()[name] * (1 + noise)
            ):
                larger = budget.used(plan.numbers()) < budget.used(best.numbers())
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
        """Those that failed, some of those that broke the budget, and the best of every other combination of families."""
        there = {families(chosen.techniques)} | {families(plan.techniques) for plan, _ in passed}
        told = [(plan, why) for plan, why in passed if why]
        told += [(plan, too_much(self.room, plan, budget)) for plan, why in passed if not why][:3]
        same: HasNumbers = next(
            (one for one in ranked if one.techniques == chosen.techniques), chosen
        )  # by arithmetic too, if it is there
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
        """Why a candidate stands behind the chosen plan, whose numbers these are."""
        room, name = self.room, self.room.objective.name
        if not chosen[name] and one.numbers()[name] > 0:  # no share of nothing
            return f"{room.worse}: {room.objective.text(one.numbers()[name])}"
        behind = one.numbers()[name] / chosen[name] - 1 if chosen[name] else 0.0
        if behind >= 0.005:
            return f"{behind:.0%} {room.worse}"
        if budget.used(one.numbers()) > budget.used(chosen):
            return f"no {room.better}, and larger"
        return f"no {room.better}, and more techniques" if len(one.techniques) > techniques else f"as {room.good}"

    def more(self, found: Sequence[Candidate[T, C]], chosen: P, budget: Budget) -> tuple[P, ...]:
        """The next better plans that more budget would allow, by arithmetic."""
        name, steps = self.room.objective.name, []
        best = (1 - TIED) * chosen.numbers()[name]
        for one in sorted(found, key=lambda one: budget.used(one.numbers())):
            if budget.broken(one.numbers()) and one.numbers()[name] < best and not self.has_failed(one):
                steps.append(self.room.sketch(one))
                best = (1 - STEP) * one.numbers()[name]
        return tuple(steps[:BOUGHT])

    def refusals(self, most: Exactness) -> tuple[tuple[str, str], ...]:
        """Techniques of which no setting could be used, and why."""
        found = []
        for kind in filter(self.room.concerns, self.room.catalogue):
            reasons = [one.refusal(self.cost) or self.too_inexact(one, most) for one in kind.explained(self.cost)]
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
        """The refusal, with the least demanding plan and what further levels would buy."""
        hint = "".join(
            self.bought(level, nearest, budget) for level in Exactness if levels[-1] < level < Exactness.CHANGED
        )
        limits = " and ".join(
            limit_text(limit.value, limit.unit, True) if limit.least else unit_text(limit.value, limit.unit)
            for limit in budget.limits()
        )
        return OverBudget(
            f"nothing fits {limits}: {len(found):,} combinations were tried and the least that works is "
            f"{self.taken(nearest, budget, self.room.phrases)}, with {nearest} "
            f"({nearest.exactness.word}, {self.reached(nearest)}){hint}{self.room.hint()}",
            nearest,
        )

    def bought(self, level: Exactness, nearest: P, budget: Budget) -> str:
        """What the plans of a further level would take, by arithmetic; nothing if that is no less."""
        there = (one for one in self.candidates(level) if one.exactness == level)
        least = min(there, key=lambda one: budget.used(one.numbers()), default=None)
        if least is None or budget.used(least.numbers()) >= budget.used(nearest.numbers()):
            return ""
        return (
            f"; {level.flag} ({level.word}) allows {self.room.sketch(least)}, which needs {self.taken(least, budget, {})} "
            f"{self.room.arithmetic} ({self.reached(least)})"
        )

    def taken(self, one: HasNumbers, budget: Budget, phrases: Mapping[str, str]) -> str:
        """What it takes of what is limited, as limits that it keeps."""
        numbers = one.numbers()
        return " and ".join(
            phrases.get(limit.figure, "{}").format(limit_text(numbers[limit.figure], limit.unit, limit.least))
            for limit in budget.limits()
            if limit.figure in numbers
        )

    def reached(self, one: HasNumbers) -> str:
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
    """All allowed combinations up to an inexactness, each cost computed from the one it extends."""
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
    """Those that keep the budget by arithmetic, best first; of those as good, the more exact, the smaller by a percent of the budget,
    the simpler. Of those that take less than the `idle` share of the budget none counts as smaller: what saves there saves nothing.

    Wherever the line between as good and worse is drawn, some plan lies on it, and noise moves it across: no order of one ranking's
    numbers alone gives always the same plan. So the plan that was chosen `earlier` stays the first, unless it is worse by more than
    noise, or it is the first with more techniques and none of them has anything to save.
    """
    fitting = [one for one in found if not budget.broken(one.numbers(), LENIENT)]
    best = min((one.numbers()[objective] for one in fitting), default=0.0)

    def rank(one: Candidate[T, C]) -> tuple[object, ...]:
        behind, used = (one.numbers()[objective] - best) / max(best, 1e-9), budget.used(one.numbers())
        taken = round(max(used / LENIENT, idle), 2)
        return 0.0 if behind <= TIED else round(behind, 2), one.exactness, taken, len(one.techniques), used

    ranked = sorted(fitting, key=rank)
    if earlier is None or budget.broken(earlier.numbers(), LENIENT):
        return ranked
    needless = (
        ranked and budget.used(ranked[0].numbers()) <= idle and set(ranked[0].techniques) < set(earlier.techniques)
    )
    if earlier.numbers()[objective] <= best * (1 + NOISE) and not needless:
        ranked = [earlier, *(one for one in ranked if one.techniques != earlier.techniques)]
    return ranked


def tiers(found: Iterable[Candidate[T, C]], levels: Sequence[Exactness]) -> list[Exactness]:
    """The allowed levels that add a candidate to those before them."""
    there = {one.exactness for one in found}
    return [
        level
        for before, level in zip((-1, *levels), levels, strict=False)
        if any(before < one <= level for one in there)
    ]


def asked_for(techniques: tuple[T, ...], cost: C) -> Candidate[T, C]:
    """These techniques, in their order, as a candidate; refused with the reason if one can't be used."""
    now, level = cost, Exactness.BITS
    for technique in techniques:
        if reason := technique.refusal(now):
            raise Mistake(f"{text(technique)} can't be used for this job: {reason}")
        level, now = max(level, technique.exactness(now)), technique.cost(now)
    return Candidate(techniques, now, level, now.numbers())


def conflict(room: Room[T, Any, Any], techniques: Iterable[T]) -> str:
    """Why these can't be combined; empty if they can."""
    return next(filter(None, (room.clash(one, other) for one, other in combinations(techniques, 2))), "")


def too_much(room: Room[Any, Any, Any], plan: Plan[Any, Any], budget: Budget) -> str:
    """By how much a plan breaks the budget."""
    return " and ".join(
        f"needs {unit_text(one.found, one.limit.unit)} {room.real}, "
        f"{unit_text(abs(one.found - one.limit.value), one.limit.unit)} too {'little' if one.limit.least else 'much'}"
        for one in budget.broken(plan.numbers())
    )


def best_or_asked(
    chooser: Chooser[T, C, P],
    budget: Budget,
    plain: P,
    techniques: tuple[T, ...] | None,
    levels: Sequence[Exactness] = (Exactness.CHANGED,),
) -> Outcome[P]:
    """The best plan within the budget, or exactly these techniques. Raises OverBudget where none keeps it."""
    room = chooser.room
    if techniques is None:
        return chooser.best(budget, levels, plain, known=(plain,))
    if reason := conflict(room, techniques):
        raise Mistake(f"{named(techniques)} can't be combined: {reason}")
    chosen = room.confirm(asked_for(techniques, chooser.cost))
    if broken := budget.broken(chosen.numbers()):
        raise OverBudget(
            f"{chosen} does not keep the budget: {'; '.join(map(str, broken))}; leave --use out to let shoestring choose",
            chosen,
        )
    return Outcome(chosen, plain, asked=True, budget=budget)
