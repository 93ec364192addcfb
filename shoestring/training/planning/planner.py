"""The planner of training: gathers evidence, lets the chooser rank and confirm candidates, and reports the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from torch import nn

from shoestring.core.budget import Budget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, allowed_levels
from shoestring.core.job import Job
from shoestring.core.workers.link import Link
from shoestring.data.lengths import Lengths, Look, batches_at, look, planned_for
from shoestring.measure.process import address_limit, memory_free
from shoestring.planning.answers import MeasuredAnswers
from shoestring.planning.choose import Chooser, requested_candidate
from shoestring.planning.plan import Outcome, techniques_text
from shoestring.processes.task import Worker
from shoestring.training.catalogue import CATALOGUE, TOGETHER
from shoestring.training.evidence.gather import Evidence, gather_evidence, ledger_of_traits
from shoestring.training.evidence.plain_only import PlainOnly, is_an_answer
from shoestring.training.evidence.rehearsals import Rehearsals, Tell, silent
from shoestring.training.evidence.step import mesh_of_largest
from shoestring.training.planning.admission import admit, check_together
from shoestring.training.planning.axes import explain_cut
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan
from shoestring.training.planning.predict import Combination, Predictor
from shoestring.training.planning.process_figure import expected_process
from shoestring.training.planning.savings import useless_techniques, with_warning
from shoestring.training.room import ROOM, TrainingRoom
from shoestring.training.technique import TrainingTechnique as Technique

HOPELESS = 2.0  # times the budget that a plan needs by the ledger: its rehearsal is left out

T = TypeVar("T")


def with_doubt(outcome: TrainingOutcome) -> TrainingOutcome:
    """The outcome with a warning where the job's data look like samples rather than batches."""
    doubt = outcome.chosen.details.lengths.doubt
    warned = (*outcome.chosen.warnings, doubt) if doubt else outcome.chosen.warnings
    return replace(outcome, chosen=replace(outcome.chosen, warnings=warned))


@dataclass
class Planner:
    """One planning of a job on a machine. Evidence is kept, so nothing is measured twice."""

    job: Job
    hardware: Hardware
    worker: Worker | None = (
        None  # runs tasks of a job file in a child process, or in as many as will train; None: everything runs here
    )
    model: nn.Module | None = None  # plan for this model object instead of the job's factory
    catalogue: tuple[type[Technique], ...] = CATALOGUE
    inexact: bool = False  # whether plans may change the result (level `changed`),
    exact: str | None = (
        None  # or the closest level required: bits, rounding, distribution (default: rounding if that fits, else distribution)
    )
    wanted: tuple[Technique, ...] = ()  # techniques the user asked for; variants that need measuring are measured too
    only: bool = False  # predict nothing else, so what other techniques need is not measured
    devices: int = 1  # workers that train together,
    here: int = 1  # and how many of them are on this machine
    earlier: tuple[Technique, ...] | None = None  # the earlier choice for the same question
    kept: MeasuredAnswers | None = None  # measurements of earlier plannings of the job; None: nothing is kept
    tell: Tell = silent  # receives progress messages
    begun: float = field(default_factory=time.perf_counter)  # start of planning, by perf_counter
    failed: dict[frozenset[str], str] = field(default_factory=dict)  # families of plans that failed in rehearsal -> why

    @cached_property
    def rehearsals(self) -> Rehearsals:
        found = self.look_at_batches()
        jobs = [planned_for(self.job, batch) for batch in found.batches] or [self.job]
        if self.devices > 1:
            near, speeds = self.devices == self.here and not self.hardware.described, self.hardware.speeds
            place = Link(0, self.devices, near, speeds=speeds)
            jobs = [replace(job, mesh=mesh_of_largest(job, (), place)) for job in jobs]
        sizes = found.lengths.largest if found.batches else ()
        return Rehearsals(
            jobs[0],
            self.hardware,
            self.worker,
            self.model,
            lengths=found.lengths,
            kept=self.kept,
            tell=self.tell,
            candidates=tuple((size.number, job) for size, job in zip(sizes, jobs, strict=False)),
        )

    def look_at_batches(self) -> Look:
        """Which batches to plan for. The result of an earlier planning is used again."""
        if self.kept is None or self.job.largest is not None:
            return look(self.job)
        new: list[Look] = []

        def work() -> Lengths:
            self.tell("looking for the largest batch")
            new.append(look(self.job))
            return new[0].lengths

        lengths = self.kept.answer({"lengths": [self.job.steps, self.job.epochs]}, Lengths, work)
        numbers = () if lengths.first else tuple(one.number for one in lengths.largest)
        return new[0] if new else Look(lengths, tuple(batches_at(self.job, numbers)) if numbers else ())

    @cached_property
    def evidence(self) -> Evidence:
        return gather_evidence(self.rehearsals, self.variants(), self.wanted if self.only else None)

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.rehearsals, self.evidence, self.devices, self.here)

    def variants(self) -> list[Technique]:
        """The variants to measure beside the plain step: those that may be chosen or were asked for, if this machine
        can run them."""
        kinds: dict[type[Technique], None] = dict.fromkeys((*self.catalogue, *(type(one) for one in self.wanted)))
        return [
            one
            for kind in kinds
            for one in kind.variants()
            if not self.hardware.dtypes.get(one.computes_in)
            and ((self.inexact and not self.wanted) or one in self.wanted)
        ]

    def ledger(self) -> Ledger:
        return self.evidence.ledger

    def outcome(self, memory: int | None, forced: tuple[Technique, ...] | None = None) -> TrainingOutcome:
        """The plan for a memory budget in bytes (None: what is free), or the figures of the techniques that were asked
        for."""
        if forced is not None:
            check_together(forced)  # before anything is measured
            ledger = self.inspect_or_plain_only(self.ledger)
            if isinstance(ledger, PlainOnly):
                return self.plain_outcome(ledger, memory, forced)
            return with_doubt(self.outcome_of(ledger, memory, forced))
        found = self.inspect_or_plain_only(lambda: self.at_once(memory) or self.outcome_of(self.ledger(), memory))
        return self.plain_outcome(found, memory) if isinstance(found, PlainOnly) else with_doubt(found)

    def inspect_or_plain_only(self, look: Callable[[], T]) -> T | PlainOnly:
        """The result of inspecting the job; if inspection itself fails, a PlainOnly that says why."""
        try:
            return look()
        except Exception as error:
            if is_an_answer(error):
                raise
            return self.plain_only(error)

    def plain_only(self, error: Exception) -> PlainOnly:
        known = vars(self).get("rehearsals")  # None: not even the sizes of batches are known
        largest, numbers = (known.job, known.numbers) if isinstance(known, Rehearsals) else (None, ())
        doubt = known.lengths.doubt if isinstance(known, Rehearsals) else ""
        return PlainOnly(
            self.job, error, self.worker, self.model, self.hardware.environment, largest, numbers, doubt=doubt
        )

    def plain_outcome(
        self, found: PlainOnly, memory: int | None, forced: tuple[Technique, ...] = ()
    ) -> TrainingOutcome:
        """Plain training, without inspecting the model; requests that need inspection are refused."""
        if self.devices > 1 or self.hardware.described:
            raise found.refusal("this job can't be planned for a group of workers or another machine") from found.error
        if forced:
            raise found.refusal(f"{techniques_text(forced)} can't be used for this job") from found.error
        self.tell("trying plain training, because shoestring could not look at the model")
        plain = found.plan(memory)
        return Outcome(plain, plain, budget=Budget(memory=self.free(memory)), seconds=self.seconds_so_far())

    def at_once(self, memory: int | None) -> TrainingOutcome | None:
        """Plain training, if it leaves much of the budget idle; else None.

        Techniques have nothing to save then, and a faster update is not worth other bits than the user's own optimizer
        gives. So nothing is ranked, and one plain step is measured for its figures, in one process; no measurement
        decides.
        """
        if (
            self.worker is None
            or self.job.origin is None
            or self.devices > 1
            or self.inexact
            or self.hardware.described
            or address_limit()
        ):
            return None
        log, budget = self.rehearsals.log(()), self.free(memory)
        if self.rehearsals.real or expected_process(log) > ROOM * budget:
            return None
        evidence = gather_evidence(self.rehearsals, (), only=())
        plain = Predictor(self.rehearsals, evidence).plan(requested_candidate((), evidence.ledger))
        if plain.predicted["process_bytes"] > ROOM * budget or evidence.anchor is None:
            return None
        idle = (
            f"plain training leaves {1 - plain.predicted['process_bytes'] / budget:.0%} of the budget idle, so no technique was "
            "looked at"
        )
        chosen = replace(plain, basis=f"{plain.basis}; {idle}")
        return Outcome(chosen, chosen, budget=Budget(memory=budget), seconds=self.seconds_so_far())

    def outcome_of(
        self, ledger: Ledger, memory: int | None, forced: tuple[Technique, ...] | None = None
    ) -> TrainingOutcome:
        """The outcome for a measured ledger; several budgets can be asked for, one after the other."""
        budget = self.budget(memory)
        assert budget.memory is not None, "the budget is at least the free memory"
        simplest: tuple[Technique, ...] = (TOGETHER,) if self.devices > 1 else ()
        apart = TOGETHER.refusal(ledger) if simplest else ""  # why workers can't each train a replica
        one = requested_candidate(() if apart else simplest, ledger)
        plain = self.predictor.sketch(one) if apart or self.is_hopeless(one, budget) else self.predictor.plan(one)
        if forced is not None:
            chosen = self.figures_of(ledger, forced) if forced != simplest or apart else plain
            fits = int(not budget.broken_limits(chosen.numbers()))
            chosen = explain_cut(self.predictor.with_ranks(chosen), plain, budget.memory)
            chosen = chosen if apart else with_warning(chosen, plain)
            return Outcome(chosen, plain, asked=True, fitting=fits, budget=budget, seconds=self.seconds_so_far())
        self.tell("ranking all combinations of techniques")
        room = TrainingRoom(self.predictor, self.catalogue, plain, self.inexact, apart)
        self.predictor.limit = budget.memory
        try:
            found = Chooser(room, ledger, self.failed).best(
                budget, self.levels, plain, () if apart else (plain,), self.earlier
            )
        finally:
            self.predictor.limit = inf
        chosen = explain_cut(self.predictor.with_ranks(found.chosen), plain, budget.memory)
        return replace(found, chosen=chosen, seconds=self.seconds_so_far())

    def is_hopeless(self, one: Combination, budget: Budget) -> bool:
        """Whether a described device is so much too small for a plan that a rehearsal, which takes seconds for a large
        model, would tell nothing new."""
        return self.hardware.described and bool(budget.broken_limits(one.numbers(), HOPELESS))

    def budget(self, memory: int | None) -> Budget:
        """The memory for a process: what was asked for or is free, up to the limit of its address space."""
        limit, most = address_limit(), self.free(memory)
        return Budget(memory=most if limit is None else min(most, limit - self.evidence.reserved))

    def free(self, memory: int | None) -> int:
        """The bytes that were asked for, or that are free."""
        free = self.hardware.memory if self.hardware.described else memory_free() / self.here
        return memory if memory is not None else int(0.9 * free)

    @property
    def levels(self) -> tuple[Exactness, ...]:
        return allowed_levels(self.exact, self.inexact)

    def check_named(self, techniques: tuple[Technique, ...]) -> Combination:
        """Techniques that the user named, checked for this job without a real step; a Mistake says why they can't be
        used."""
        check_together(techniques)
        ledger = self.inspect_or_plain_only(lambda: ledger_of_traits(self.rehearsals, techniques))
        if isinstance(ledger, PlainOnly):
            raise ledger.refusal(f"{techniques_text(techniques)} can't be used for this job") from ledger.error
        return admit(techniques, ledger, self.exact)

    def figures_of(self, ledger: Ledger, techniques: tuple[Technique, ...]) -> TrainingPlan:
        """The figures of these techniques, with a warning for each that is of no use."""
        one = admit(techniques, ledger, self.exact)
        try:
            plan = self.predictor.attempt(one)
        except Mistake as error:
            raise Mistake(f"{one} can't be used for this job: {error}") from error
        return replace(plan, basis="; ".join((plan.basis, *useless_techniques(self.predictor, plan))))

    def seconds_so_far(self) -> float:
        return time.perf_counter() - self.begun
