"""The planner: measure, rank every combination on the ledger, rehearse the finalists, choose and explain."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shoestring.core.batch import samples
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.hardware import Hardware
from shoestring.core.job import Job
from shoestring.core.ledger import Ledger
from shoestring.core.link import Link, agreement_bytes
from shoestring.core.technique import (
    Exactness,
    Technique,
    choices,
    described,
    environment,
    exactness,
    in_order,
    refusal,
    text,
    total_cost,
)
from shoestring.core.units import bytes_text, seconds_text
from shoestring.measure.process import address_limit, memory_free, status
from shoestring.measure.timeline import blocks_of, filled, last_step, peak, stretches
from shoestring.measure.tracker import Log
from shoestring.memory.accumulate import Accumulate
from shoestring.memory.allocator import Allocator, following
from shoestring.memory.checkpoint import Checkpoint
from shoestring.memory.precision import Precision
from shoestring.parallel.average import Average
from shoestring.planning.anchor import paged
from shoestring.planning.catalogue import CATALOGUE
from shoestring.planning.conflicts import conflict, unites
from shoestring.planning.plan import Plan
from shoestring.planning.rehearse import rehearse
from shoestring.planning.search import Candidate, best_first, candidate, candidates
from shoestring.planning.step import Anchor, first_batch, half_log, plain_ledger, put_together, traits_of

Worker = Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any]]   # task, environment -> result

SLACK = 1.05           # what a device's own allocator takes above the tensors, where that can't be measured
MARGIN = 1.02          # on the predicted process: better two percent too much than a run over its budget
TRIALS = 2             # real trials of allocators whose behaviour can't be predicted,
MORE_TRIALS = 6        # or so many while what can be predicted is slower by more than
WORTH = 1.2            # this factor
TRIAL_STEPS = 4
GROUP_STEPS = 8        # of a trial by all workers, which are timed too
FINALISTS = 10         # rehearsals of plans that turn out not to fit, before we say that none does
SAMPLE = 3 << 28       # bytes: a block that needs more is not made only to be timed
ALIKE = (0.0, 1.0)     # shares of the steps after which workers agree, that make all steps alike
PATIENCE = 40.0        # seconds: an anchor step expected to take longer is not run


@dataclass(frozen=True)
class Outcome:
    """What the planner found."""

    chosen: Plan
    plain: Plan
    runners_up: tuple[tuple[Plan, str], ...]   # and why each lost
    tried: int
    fitting: int
    seconds: float
    memory: int
    more: tuple[Plan, ...]                     # what more memory would buy, next first
    refused: tuple[tuple[str, str], ...]       # techniques that can't be used here, and why

    def as_json(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen.as_json(), "plain": self.plain.as_json(), "memory": self.memory, "tried": self.tried,
            "fitting": self.fitting, "seconds": self.seconds,
            "runners_up": [plan.as_json() | {"lost": why} for plan, why in self.runners_up],
            "more_memory": [plan.as_json() for plan in self.more],
            "refused": [{"technique": name, "reason": why} for name, why in self.refused],
        }


@dataclass
class Planner:
    """One planning: a job, the machine, and ways to run things elsewhere. Results are kept, so nothing is measured twice."""

    job: Job
    hardware: Hardware
    worker: Worker | None = None        # runs tasks of a job file in a child process, or in as many as will train; None: all happens here
    model: nn.Module | None = None      # plan for this very model instead of the job's factory
    catalogue: tuple[type[Technique], ...] = CATALOGUE
    inexact: bool = False
    wanted: tuple[Technique, ...] = ()  # techniques the user asked for; their precisions are measured too
    devices: int = 1                    # workers that train together,
    here: int = 1                       # of which so many share this machine

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()
        if self.devices > 1:
            near = self.devices == self.here and not self.hardware.described
            self.job = replace(self.job, link=Link(largest_worker(self.job, self.devices), self.devices, near))
        self.real = False               # whether rehearsals need real tensors
        self.guessed = ""
        self.trials = 0
        self.reserved = 0               # bytes of address space that a worker needs above its memory

    # Measuring

    def log(self, techniques: tuple[Technique, ...]) -> Log:
        """The log of a rehearsal: on fake tensors, or where those can't run the model, on real ones in a child process."""
        if not self.real:
            try:
                return rehearse(self.job, techniques, model=self.model)
            except Mistake:
                raise
            except Exception as error:
                if self.worker is None:
                    raise Mistake(f"the model can't be planned on fake tensors ({type(error).__name__}: {first_line(error)}) and "
                                  f"without a job file there is no other process to try it in: write a job file") from error
                if techniques:
                    raise
                self.guessed = f"{type(error).__name__}: {first_line(error)}"
                self.real = True
        assert self.worker is not None, "real rehearsals run in a child process"
        return Log.from_json(self.worker(self.task("rehearse", techniques), following().environment))

    def task(self, name: str, techniques: tuple[Technique, ...], **more: Any) -> dict[str, Any]:
        assert self.job.origin is not None, "only a job from a file can be made again in a child process"
        return {"task": name, "file": self.job.origin.file, "flags": dict(self.job.origin.flags),
                "techniques": [described(technique) for technique in techniques],
                "place": (self.job.link.rank, self.job.link.world, self.job.link.near)} | more

    def anchors(self, plain: Log, precisions: tuple[Precision, ...]) -> tuple[dict[str, Anchor], dict[str, str]]:
        """Measured steps by precision ("" is plain), and what failed."""
        if self.worker is None or self.job.origin is None:
            return {}, {}
        extra = self.modest(plain)
        if extra is None:
            return self.sample(plain), {}
        variants = {"": extra} | {precision.key: in_order((*extra, precision)) for precision in precisions}
        task = {key: [described(technique) for technique in techniques] for key, techniques in variants.items()}
        timed = self.worker(self.task("anchor", (), variants=task, memory=False), self.hardware.environment)
        self.reserved = timed[""]["reserved"]
        close = {**self.hardware.environment, **following().environment}
        sized = self.worker(self.task("anchor", (), variants={"": task[""]}, memory=True), close)
        pieces = next((technique.pieces for technique in extra if isinstance(technique, Accumulate)), 1)
        tensors = peak(self.log(extra)).bytes if extra else peak(plain).bytes
        found, failed = {}, {}
        for key in variants:
            if "error" in timed[key]:
                failed[key] = timed[key]["error"]
                continue
            found[key] = Anchor(
                timed[key]["times"], tuple(map(tuple, timed[key]["paces"])), timed[key]["adding"], timed[key].get("call", 0.0),
                timed[key].get("fused"), sized[""]["times"]["step"],
                timed[""]["process"], tensors, sized[""]["overheads"], sized[""]["filled"], pieces, bool(extra),
            )
        return found, failed

    def sample(self, plain: Log) -> dict[str, Anchor]:
        """An anchor of one block of each kind, where a whole step is too much and a block is not."""
        assert self.worker is not None, "samples run in a child process"
        largest = max((block.gradient + block.kept for block in blocks_of(plain) if block.inside), default=0)
        if not largest or self.real or 2 * largest > SAMPLE:
            return {}
        found = self.worker(self.task("sample", ()), {**self.hardware.environment, **following().environment})
        self.reserved = found["reserved"]
        return {"": put_together(found, plain)}

    def modest(self, plain: Log) -> tuple[Technique, ...] | None:
        """Techniques under which the anchor step fits this machine; none if it can't, or would take too long."""
        flops = sum(plain.flops.values()) / 2
        if flops / self.hardware.flops > PATIENCE:
            return None
        free = 0.8 * memory_free()
        tries: list[tuple[Technique, ...]] = [()]
        if "can't be split" not in self.traits:
            pieces = samples(first_batch(self.job))
            tries += [(Accumulate(n), Checkpoint(every=1)) for n in (2, 4, 8, 16, 32) if n <= pieces]
        for techniques in tries:
            need = peak(plain).bytes * 1.5 if not techniques else peak(self.log(techniques)).bytes * 2
            if need + 1e9 < free:
                return techniques
        return None

    def ledger(self) -> Ledger:
        """The plain step's ledger, with the same step at other precisions under it."""
        self.plain_log = self.log(())
        self.traits = traits_of(self.job, self.plain_log, self.worker is not None)
        half = None
        if "can't be split" not in self.traits and samples(first_batch(self.job)) > 1 and not self.real:
            half = half_log(self.job, model=self.model)
        precisions = self.precisions()
        self.found_anchors, failed = self.anchors(self.plain_log, precisions)
        self.traits |= {f"no {dtype}" for dtype, what in self.hardware.dtypes.items() if what}
        anchor = self.found_anchors.get("")
        ledger = plain_ledger(self.job, self.plain_log, half, self.hardware, anchor, self.traits)
        if self.real:
            ledger = replace(ledger, sure=f"measured on real tensors, because fake ones could not run it ({self.guessed})")
        under = {}
        for precision in precisions:
            if precision.key in failed:
                self.traits.add(f"no {precision.dtype}")
                continue
            try:
                log = self.log((precision,))
                part = half_log(self.job, (precision,), model=self.model) if half is not None else None
            except RuntimeError:
                self.traits.add(f"no {precision.dtype}")
                continue
            under[precision.key] = plain_ledger(self.job, log, part, self.hardware,
                                                self.found_anchors.get(precision.key), self.traits)
        return replace(ledger, under=under, traits=frozenset(self.traits))

    def ledger_traits(self) -> Ledger:
        """A ledger that knows the model's traits and nothing else."""
        log = self.log(())
        return Ledger((), traits=frozenset(traits_of(self.job, log, self.worker is not None)))

    def precisions(self) -> tuple[Precision, ...]:
        all_of_them = (Precision("bf16"), Precision("fp16"), Precision("bf16", "bf16"))
        asked = [technique for technique in self.wanted if isinstance(technique, Precision)]
        return tuple(one for one in all_of_them
                     if not self.hardware.dtypes.get(one.dtype) and ((self.inexact and not self.wanted) or one in asked))

    # Predicting

    def rehearsed(self, one: Candidate) -> Plan:
        """A candidate with its exact figures."""
        log = self.log(one.techniques) if one.techniques else self.plain_log
        highest = peak(log)
        seconds = one.seconds
        if self.tries_group(log):
            tried = self.trial(one.techniques, GROUP_STEPS, together=True)
            predicted, how = tried["process_bytes"] * MARGIN, f"and time from a trial of {GROUP_STEPS} steps by {self.devices} workers"
            seconds = tried["step_seconds"] if agrees(one.techniques) in ALIKE else seconds
        else:
            predicted, how = self.process(one, log)
        steps = sum(1 for _, moment in log.marks if moment.phase == "update")
        return Plan(
            one.techniques, highest.bytes, int(predicted), seconds, one.exactness <= Exactness.ROUNDING,
            sum(log.flops.values()) / max(steps, 1), float(log.moved[-1]) if log.moved else one.ledger.traffic,
            self.sent(one, log), self.devices, f"{highest.moment.phase} of {highest.moment.block or 'all weights'}",
            highest.parts, f"{one.ledger.sure}; process {how}", log.stored, disk_speed(one.ledger), by_block(log),
        )

    def sent(self, one: Candidate, log: Log) -> float:
        """Bytes that a worker sends a step, with what workers agree on after it; the ledger's mean where not all steps are alike."""
        if self.devices == 1:
            return 0.0
        share = agrees(one.techniques)
        step = log.sent[-1] if share in ALIKE and log.sent else one.ledger.sent
        return step + share * agreement_bytes(self.devices)

    def process(self, one: Candidate, log: Log) -> tuple[float, str]:
        """Bytes of the process, and how we know."""
        anchor = self.found_anchors.get("")
        allocator = next((technique for technique in one.techniques if isinstance(technique, Allocator)), None)
        belonging = self.hardware.links.get(str(self.devices), (0.0, 0.0, 0.0))[2]   # bytes of a process for its part in a group
        if self.hardware.described:
            return peak(log).bytes * SLACK + self.hardware.base, "estimated from the tensors: the hardware is not here"
        if self.worker is None:
            held = sum(p.untyped_storage().nbytes() for p in self.model.parameters()) if self.model is not None else 0
            return status("VmRSS") + (peak(log).bytes - held) * 1.35, "estimated from this process and its tensors"
        if anchor is None or (anchor.sampled and not (allocator is not None and allocator.predictable)):
            return one.process, "estimated: no real step could be run here"
        if allocator is not None and allocator.predictable:
            base = min(anchor.overheads.values())
            most = max(stretch.top + anchor.overheads.get(" ".join(stretch.moment), base)
                       for stretch in list(stretches(filled(log, anchor.filled), paged))[1:])
            return (most + belonging) * MARGIN, "from the anchor step and every tensor's pages"
        if not one.techniques and not anchor.eased:
            return anchor.process * MARGIN, "from the anchor step"
        if not self.has_room(log):
            return one.process, "estimated: this machine has no room to try it"
        tried = self.trial(one.techniques, TRIAL_STEPS)
        return (tried["process_bytes"] + belonging) * MARGIN, f"from a trial of {TRIAL_STEPS} steps"

    def tries_group(self, log: Log) -> bool:
        """Whether plans are tried by all workers: they are all here, and can run a whole step."""
        anchor = self.found_anchors.get("")
        return self.devices == self.here > 1 and anchor is not None and not anchor.sampled and self.has_room(log)

    def has_room(self, log: Log) -> bool:
        """Whether all workers here can be run at once with this log."""
        return self.here * (peak(log).bytes * 1.35 + 5e8) < memory_free()

    def trial(self, techniques: tuple[Technique, ...], steps: int, together: bool = False) -> dict[str, Any]:
        """What some real steps take; `together`: by workers that talk to each other."""
        assert self.worker is not None, "trials run in a child process"
        self.trials += 1
        measured: dict[str, Any] = self.worker(self.task("trial", techniques, steps=steps, together=together),
                                               {**self.hardware.environment, **environment(techniques)})["measured"]
        return measured

    # Choosing

    def outcome(self, memory: int | None, forced: tuple[Technique, ...] | None = None) -> Outcome:
        """The plan for a memory budget (None: what is free), or the figures of the techniques that were asked for."""
        if forced is not None and conflict(in_order(forced)):
            raise Mistake(f"{' + '.join(map(text, in_order(forced)))} can't be combined: {conflict(in_order(forced))}")
        return self.decided(self.ledger(), memory, forced)

    def decided(self, ledger: Ledger, memory: int | None, forced: tuple[Technique, ...] | None = None) -> Outcome:
        """The outcome for a ledger that was measured; several budgets can be asked for, one after the other."""
        self.trials = 0
        free = self.hardware.memory if self.hardware.described else memory_free() / self.here
        budget = memory if memory is not None else int(0.9 * free)
        limit = address_limit()
        if limit is not None:
            budget = min(budget, limit - self.reserved)
        simplest: tuple[Technique, ...] = (Average(),) if self.devices > 1 else ()
        plain = self.rehearsed(candidate(simplest, total_cost(simplest, ledger), Exactness.BITS))
        if forced is not None:
            chosen = self.forced(ledger, forced) if forced != simplest else plain
            return Outcome(chosen, plain, (), 1, int(chosen.process_bytes <= budget), self.elapsed(), budget, (), ())
        most = Exactness.CHANGED if self.inexact else Exactness.DRAWS
        found = list(candidates(ledger, self.catalogue, most))
        ranked = best_first(found, budget * 1.03)
        best, passed = self.first_fitting(ranked, budget, plain)
        if best is None:   # the ledger may have been too careful
            best = self.nearest(found, passed)
        if best.process_bytes > budget:
            raise self.over_budget(found, budget, best)
        return Outcome(
            best, plain, self.runners_up(ranked, best, passed), len(found), len(ranked), self.elapsed(), budget,
            self.more(found, best, budget), self.refusals(ledger, most),
        )

    def forced(self, ledger: Ledger, forced: tuple[Technique, ...]) -> Plan:
        techniques = in_order(forced)
        now, level = ledger, Exactness.BITS
        for technique in techniques:
            reason = refusal(technique, now)
            if reason:
                raise Mistake(f"{text(technique)} can't be used for this job: {reason}")
            level = max(level, exactness(technique, now))
            now = technique.cost(now)
        return self.rehearsed(candidate(techniques, now, level))

    def first_fitting(self, ranked: list[Candidate], budget: int, plain: Plan) -> tuple[Plan | None, list[tuple[Plan, str]]]:
        """The first candidate that fits when rehearsed, and those that were passed over with the reason."""
        passed: list[tuple[Plan, str]] = []
        worse: dict[object, float] = {}   # kind of plan -> how much more it needed than the ledger said
        sure = next((one.seconds for one in ranked if not self.unpredictable(one)), float("inf"))
        for one in ranked:
            needs_trial = self.unpredictable(one)
            # What the default allocator keeps back is a guess, and a trial of one plan tells of all of them.
            kind: object = "unpredictable" if needs_trial else kind_of(one.techniques)
            if one.process * worse.get(kind, 1.0) > budget or (needs_trial and self.trials >= self.trials_worth(one, sure)):
                continue
            try:
                plan = plain if one.techniques == plain.techniques else self.rehearsed(one)
            except Mistake as error:   # only a rehearsal shows that a technique can't be used for this model
                passed.append((sketched(one), str(error)))
                worse[kind] = float("inf")
                continue
            if plan.process_bytes <= budget:
                return plan, passed
            worse[kind] = max(plan.process_bytes / one.process, worse.get(kind, 0.0))
            passed.append((plan, f"needs {bytes_text(plan.process_bytes)} when rehearsed, "
                                 f"{bytes_text(plan.process_bytes - budget)} too much"))
            if len(passed) > FINALISTS:
                break
        return None, passed

    def trials_worth(self, one: Candidate, sure: float) -> int:
        """Real trials to spend before a candidate is passed over; `sure`: seconds of the best plan that needs none."""
        if self.found_anchors[""].sampled:   # a whole step can't be run here, so nothing can be tried
            return 0
        return MORE_TRIALS if one.seconds * WORTH < sure else TRIALS

    def unpredictable(self, one: Candidate) -> bool:
        return "" in self.found_anchors and not any(getattr(technique, "predictable", False) for technique in one.techniques)

    def runners_up(self, ranked: list[Candidate], chosen: Plan, passed: list[tuple[Plan, str]]) -> tuple[tuple[Plan, str], ...]:
        """Those passed over, and the best of every other kind of plan."""
        kinds = {kind_of(chosen.techniques)} | {kind_of(plan.techniques) for plan, _ in passed}
        found = list(passed[:3])
        best = next((one.seconds for one in ranked if one.techniques == chosen.techniques), chosen.step_seconds)   # by the ledger too
        for one in ranked:
            if kind_of(one.techniques) not in kinds and one.seconds >= best:
                kinds.add(kind_of(one.techniques))
                slower = one.seconds / best - 1 if best else 0.0
                why = f"{slower:.0%} slower" if slower >= 0.005 else "no faster, and more techniques"
                found.append((sketched(one), why))
            if len(found) >= 5:
                break
        return tuple(found)

    def more(self, found: list[Candidate], chosen: Plan, budget: int) -> tuple[Plan, ...]:
        """The next faster plans that more memory would allow, by the ledger."""
        steps: list[Plan] = []
        fastest = 0.98 * chosen.step_seconds
        for one in sorted(found, key=lambda one: one.process):
            if one.process > budget and one.seconds < fastest:
                steps.append(sketched(one))
                fastest = 0.95 * one.seconds
        return tuple(steps[:3])

    def refusals(self, ledger: Ledger, most: Exactness) -> tuple[tuple[str, str], ...]:
        """Techniques of which no setting could be used, and why."""
        found = []
        for kind in self.catalogue:
            if self.devices == 1 and getattr(kind, "unites", False):   # nobody asked for other workers
                continue
            tried = choices(kind, ledger) or ((kind(),) if kind is Precision else ())
            reasons = [refusal(one, ledger) or ("not exact for this model: allow it with --inexact"
                                                if exactness(one, ledger) > most else "") for one in tried]
            if reasons and all(reasons):
                found.append((kind.__name__, reasons[0]))
        return tuple(found)

    def nearest(self, found: list[Candidate], passed: list[tuple[Plan, str]]) -> Plan:
        """The least demanding plan there is, rehearsed."""
        least = sorted(found, key=lambda one: (one.process, one.seconds))
        sure = [one for one in least if not self.unpredictable(one)] or least
        plans = [plan for plan, why in passed if why.startswith("needs ")]
        for one in sure[:3]:
            with suppress(Mistake):
                plans.append(self.rehearsed(one))
        return min(plans, key=lambda plan: plan.process_bytes)

    def over_budget(self, found: list[Candidate], budget: int, nearest: Plan) -> OverBudget:
        """The refusal, with the least demanding plan."""
        hint = "" if self.inexact else "; --inexact allows 16-bit precision as well"
        return OverBudget(
            f"nothing fits {bytes_text(budget)}: {len(found):,} combinations were tried and the least that works is "
            f"{bytes_text(nearest.process_bytes)} for the whole process, with {nearest} "
            f"({seconds_text(nearest.step_seconds)} a step){hint}", nearest)

    def elapsed(self) -> float:
        return time.perf_counter() - self.begun


def largest_worker(job: Job, devices: int) -> int:
    """The worker with the largest part of a batch, which is the last one, or where parts are equal of the state, which is the first."""
    count = samples(first_batch(job))
    if count < devices:
        raise Mistake(f"batches of {count} samples for {devices} workers: some would have none; give a batch of {devices} samples or more, "
                      f"or fewer --devices")
    return devices - 1 if count % devices else 0


def agrees(techniques: tuple[Technique, ...]) -> float:
    """After which share of the steps workers agree."""
    return next((getattr(technique, "agrees", 1.0) for technique in techniques if unites(technique)), 1.0)


def kind_of(techniques: tuple[Technique, ...]) -> frozenset[str]:
    """The names of a plan's techniques; allocators differ by more than a knob."""
    return frozenset(text(one) if isinstance(one, Allocator) else type(one).__name__ for one in techniques)


def sketched(one: Candidate) -> Plan:
    """A candidate with the ledger's figures."""
    return Plan(one.techniques, int(one.peak), int(one.process), one.seconds, one.exactness <= Exactness.ROUNDING,
                one.ledger.flops, one.ledger.traffic, one.ledger.sent, one.ledger.world, sure="by the ledger alone, not rehearsed",
                disk_speed=disk_speed(one.ledger))


def disk_speed(ledger: Ledger) -> float:
    """Bytes per second at which a step's traffic passes, by what was measured of the disk; 0 if there is none."""
    return ledger.traffic / ledger.disk_seconds if ledger.disk_seconds else 0.0


def by_block(log: Log) -> tuple[tuple[str, int], ...]:
    """Highest bytes alive while each block ran, in the order of the last step."""
    tops: dict[str, int] = {}
    for stretch in last_step(log)[0]:
        name = f"{stretch.moment.phase} {stretch.moment.block}".strip()
        tops[name] = max(tops.get(name, 0), stretch.top)
    return tuple(tops.items())


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


