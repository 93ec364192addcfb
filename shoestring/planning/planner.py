"""The planner: measure, rank every combination on the ledger, rehearse the finalists, choose and explain."""
from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shoestring.core import random_state as chance
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness, allowed
from shoestring.core.hardware import Hardware
from shoestring.core.job import Job
from shoestring.core.ledger import Ledger
from shoestring.core.link import ALONE, Link, agreement_bytes
from shoestring.core.technique import in_order, text, total_cost
from shoestring.core.training import TrainingTechnique as Technique
from shoestring.core.training import environment
from shoestring.core.units import bytes_text, seconds_text
from shoestring.measure.fake import LooksAtValues
from shoestring.measure.instructions import deadly
from shoestring.measure.process import address_limit, memory_free, status
from shoestring.measure.timeline import blocks_of, filled, last_step, peak, stretches
from shoestring.measure.tracker import Log
from shoestring.memory.accumulate import Accumulate
from shoestring.memory.allocator import Allocator, following
from shoestring.memory.checkpoint import Checkpoint
from shoestring.memory.offload import OffloadOptimizer
from shoestring.memory.precision import Precision
from shoestring.memory.recompute import ABOUT_A_BLOCK
from shoestring.memory.spill import Spill
from shoestring.memory.step_in_backward import StepInBackward
from shoestring.memory.stream import Stream
from shoestring.parallel.average import Average
from shoestring.planning.catalogue import CATALOGUE
from shoestring.planning.conflicts import conflict
from shoestring.planning.evidence.anchor import paged, why_not_again
from shoestring.planning.evidence.pieces import tried_in_pieces
from shoestring.planning.evidence.rehearse import rehearse, tracked
from shoestring.planning.evidence.step import Anchor, first_batch, half_log, plain_ledger, put_together, traits_of, unsplittable
from shoestring.planning.evidence.tasks import (
    AnchorTask,
    PiecesTask,
    Position,
    RehearseTask,
    SampleTask,
    TrialResult,
    TrialTask,
    Worker,
    specs_of,
)
from shoestring.planning.plan import Plan
from shoestring.planning.search import Candidate, best_first, candidate, candidates

SAVING = (Accumulate, Checkpoint, OffloadOptimizer, Spill, StepInBackward, Stream)   # what is there to save memory of tensors
SLACK = 1.05           # what a device's own allocator takes above the tensors, where that can't be measured
MARGIN = 1.02          # on the predicted process: better two percent too much than a run over its budget
TRIALS = 2             # real trials of allocators whose behaviour can't be predicted,
MORE_TRIALS = 6        # or so many while what can be predicted is slower by more than
WORTH = 1.2            # this factor
TRIAL_STEPS = 4
SPREAD = 1.04          # between two trials of one plan: threads race for memory. A plan this close to the budget is tried again,
AGAIN = 2              # so often
GROUP_STEPS = 8        # of a trial by all workers, which are timed too
FINALISTS = 10         # rehearsals of plans that turn out not to fit, before we say that none does
SAMPLE = 3 << 28       # bytes: a block that needs more is not made only to be timed
ALIKE = (0.0, 1.0)     # shares of the steps after which workers agree, that make all steps alike
COPIES = 8             # of a model's weights that must fit in memory for real steps in this process: gradients, moments, activations
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
    inexact: bool = False               # whether plans may be `changed`,
    exact: str | None = None            # or the least that they must be: bits, rounding, draws (default: rounding if that fits, else draws)
    wanted: tuple[Technique, ...] = ()  # techniques the user asked for; their precisions are measured too
    devices: int = 1                    # workers that train together,
    here: int = 1                       # of which so many share this machine
    earlier: tuple[Technique, ...] | None = None   # what was chosen when the same was asked before

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()
        if self.devices > 1:
            near = self.devices == self.here and not self.hardware.described
            self.job = replace(self.job, link=Link(largest_worker(self.job, self.devices), self.devices, near))
        self.real = False               # whether rehearsals need real tensors
        self.guessed = ""               # why fake tensors can't run the model
        self.measured: set[tuple[Technique, ...]] = set()   # plans that were rehearsed on real tensors
        self.reasons: dict[str, str] = {}                # trait -> what was found that shows it
        self.tried: dict[str, str] = {"not tried": "no real step could be run here"}   # what a trial in two pieces found
        self.again = ""                 # why blocks can't be computed again
        self.failed: dict[frozenset[str], str] = {}      # kinds of plans that failed when they were rehearsed, and how
        self.trials = 0
        self.reserved = 0               # bytes of address space that a worker needs above its memory

    # Measuring

    def log(self, techniques: tuple[Technique, ...], rank: int | None = None) -> Log:
        """The log of a rehearsal: on fake tensors, or where those can't run the model, on real ones.

        It is that of the worker that needs most, or of this one.
        """
        place = self.job.link
        if rank is None and any(technique.serves for technique in techniques):
            rank = place.world - 1
        if rank is not None:
            place = Link(rank, place.world, place.near)
        if not self.real:
            try:
                return rehearse(replace(self.job, link=place), techniques, model=self.model)
            except Mistake:
                raise
            except Exception as error:
                if techniques and not isinstance(error, LooksAtValues):
                    raise
                self.guessed = first_line(error) if isinstance(error, LooksAtValues) else f"{type(error).__name__}: {first_line(error)}"
                self.real = not techniques   # what plain steps can do on fake tensors, other plans can
        self.measured.add(techniques)
        if self.worker is not None:
            stands = {"position": Position(place.rank, place.world, place.near)}
            return self.worker(RehearseTask(**self.about_job(techniques) | stands), following().environment)
        return self.log_here(replace(self.job, link=place), techniques)

    def log_here(self, job: Job, techniques: tuple[Technique, ...]) -> Log:
        """The log of real steps in this process, of a copy of the model; refused where that might not fit."""
        with chance.kept():
            if COPIES * self.weights() > memory_free():
                raise Mistake(f"the model can't be planned on fake tensors ({self.guessed}), and this process has no room to try it: write "
                              f"a job file, so that it can be tried elsewhere")
            model = self.made_here()
            chance.seed(job.seed)
            return tracked(job, techniques, model)

    def weights(self) -> int:
        """Bytes of the model's weights; 0 if only making it would tell."""
        if self.model is not None:
            return sum(one.nbytes for one in self.model.parameters())
        with suppress(Exception), torch.device("meta"):
            return sum(one.nbytes for one in self.job.model().parameters())
        return 0

    def about_job(self, techniques: tuple[Technique, ...] = ()) -> dict[str, Any]:
        """What every task about this job has in common."""
        assert self.job.origin is not None, "only a job from a file can be made again in a child process"
        return {"file": self.job.origin.file, "flags": dict(self.job.origin.flags), "techniques": specs_of(techniques),
                "position": Position(self.job.link.rank, self.job.link.world, self.job.link.near)}

    def anchors(self, plain: Log, precisions: tuple[Precision, ...]) -> tuple[dict[str, Anchor], dict[str, str]]:
        """Measured steps by precision ("" is plain), and what failed."""
        if self.worker is None or self.job.origin is None:
            return {}, {}
        extra = self.modest(plain)
        if extra is None:
            return self.sample(plain), {}
        variants = {"": extra} | {precision.key: in_order((*extra, precision)) for precision in precisions}
        specs = {key: specs_of(techniques) for key, techniques in variants.items()}
        try:
            timed = self.worker(AnchorTask(**self.about_job(), variants=specs), self.hardware.environment)
        except Mistake as error:
            if not extra or not str(error).startswith(ABOUT_A_BLOCK):   # memory that ran out says nothing of blocks
                raise
            self.again = str(error)   # blocks that can't be computed again, of a model too large for a plain step
            return {}, {}
        self.reserved = timed.steps[""].reserved
        self.tried, self.again = dict(timed.pieces), timed.again
        close = {**self.hardware.environment, **following().environment}
        sized = self.worker(AnchorTask(**self.about_job(), variants={"": specs[""]}, memory=True), close).steps[""]
        pieces = next((technique.pieces for technique in extra if isinstance(technique, Accumulate)), 1)
        tensors = peak(self.log(extra)).bytes if extra else peak(plain).bytes
        found, failed = {}, {}
        for key in variants:
            step = timed.steps[key]
            if step.error:
                failed[key] = step.error
                continue
            found[key] = Anchor(
                step.times, step.paces, step.adding, step.call, step.fused, sized.times["step"],
                timed.steps[""].process, tensors, sized.overheads, sized.filled, pieces, bool(extra),
            )
        return found, failed

    def sample(self, plain: Log) -> dict[str, Anchor]:
        """An anchor of one block of each kind, where a whole step is too much and a block is not."""
        assert self.worker is not None, "samples run in a child process"
        largest = max((block.gradient + block.kept for block in blocks_of(plain) if block.inside), default=0)
        if not largest or self.real or 2 * largest > SAMPLE:
            return {}
        found = self.worker(SampleTask(**self.about_job()), {**self.hardware.environment, **following().environment})
        self.reserved = found.reserved
        return {"": put_together(found, plain)}

    def modest(self, plain: Log) -> tuple[Technique, ...] | None:
        """Techniques under which the anchor step fits this machine; none if it can't, or would take too long."""
        flops = sum(plain.flops.values()) / 2
        if flops / self.hardware.flops > PATIENCE:
            return None
        free = 0.8 * memory_free()
        tries: list[tuple[Technique, ...]] = [()]
        if "can't be split" not in self.traits:
            pieces = self.job.count(first_batch(self.job))
            tries += [(Accumulate(n), Checkpoint(every=1)) for n in (2, 4, 8, 16, 32) if n <= pieces]
        for techniques in tries:
            with suppress(Exception):   # what can't be done for this model is no way to run its step
                need = peak(plain).bytes * 1.5 if not techniques else peak(self.log(techniques)).bytes * 2
                if need + 1e9 < free:
                    return techniques
        return None

    def ledger(self) -> Ledger:
        """The plain step's ledger, with the same step at other precisions under it."""
        self.plain_log = self.log(())
        self.traits = traits_of(self.job, self.plain_log, self.worker is not None)
        half = None
        if "can't be split" in self.traits:
            self.reasons["can't be split"] = unsplittable(self.job)
        elif self.job.count(first_batch(self.job)) > 1 and not self.real:
            try:
                half = half_log(self.job, model=self.model)
            except Exception as error:
                self.traits.add("can't be split")
                self.reasons["can't be split"] = f"half of the batch can't be trained on: {failure(error)}"
        dying = {one.dtype for one in self.precisions() if deadly(one.dtype)}   # to this process, which rehearses them
        self.traits |= {f"{dtype} is deadly here" for dtype in dying}
        precisions = tuple(one for one in self.precisions() if one.dtype not in dying)
        self.found_anchors, failed = self.anchors(self.plain_log, precisions)
        self.traits |= {f"no {dtype}" for dtype, what in self.hardware.dtypes.items() if what}
        self.note_pieces()
        self.note_again()
        anchor = self.found_anchors.get("")
        ledger = plain_ledger(self.job, self.plain_log, half, self.hardware, anchor, self.traits)
        if self.real:
            ledger = replace(ledger, sure=self.how_real())
        if "not tried" in self.reasons:
            ledger = replace(ledger, sure=f"{ledger.sure}; whether the batch can be split was not tried: {self.reasons['not tried']}")
        under = {}
        for precision in precisions:
            if precision.key in failed:
                self.traits.add(f"no {precision.dtype}")
                self.reasons[f"no {precision.dtype}"] = failed[precision.key]
                continue
            try:
                log = self.log((precision,))
                part = half_log(self.job, (precision,), model=self.model) if half is not None else None
            except Exception as error:
                self.traits.add(f"no {precision.dtype}")
                self.reasons[f"no {precision.dtype}"] = failure(error)
                continue
            under[precision.key] = plain_ledger(self.job, log, part, self.hardware,
                                                self.found_anchors.get(precision.key), self.traits)
        return replace(ledger, under=under, traits=frozenset(self.traits), reasons=self.reasons)

    def ledger_traits(self) -> Ledger:
        """The ledger of the plain step without an anchor: enough to know how close techniques stay."""
        log = self.log(())
        self.traits = traits_of(self.job, log, self.worker is not None)
        if self.worker is not None and any(isinstance(one, Accumulate) or one.unites for one in self.wanted):
            self.tried = dict(self.worker(PiecesTask(**self.about_job()), self.hardware.environment).found)
            self.note_pieces()
        found = plain_ledger(self.job, log, None, self.hardware, None, self.traits)
        return replace(found, reasons=self.reasons)

    def note_pieces(self) -> None:
        """Note what a trial of the batch in two pieces found: the worker's, or where there is none, one here if the model is small."""
        if "mixes samples" in self.traits:
            self.reasons["mixes samples"] = "batch norm looks at all samples of a batch at once"
        if "can't be split" in self.traits or "mixes samples" in self.traits:
            return
        if self.worker is None and self.fits_here():
            self.tried = tried_in_pieces(self.job, self.made_here)
        self.reasons |= self.tried
        self.traits |= set(self.tried) - {"not tried"}

    def note_again(self) -> None:
        """Note whether blocks can be computed again: as the worker found, or where there is none, by a step here if the model is small."""
        if self.worker is None and "no block runs" not in self.traits and self.fits_here():
            with chance.kept():
                model = self.made_here()
                chance.seed(self.job.seed)
                self.again = why_not_again(replace(self.job, link=ALONE), model)
        if self.again:
            self.traits.add("can't be recomputed")
            self.reasons["can't be recomputed"] = self.again

    def fits_here(self) -> bool:
        """Whether real passes over the model can be afforded in this process."""
        if self.hardware.described:   # its speed is not this machine's
            return False
        seconds = sum(self.plain_log.flops.values()) / self.hardware.flops
        return 2 * peak(self.plain_log).bytes + 1e9 < 0.8 * memory_free() and 2 * seconds < PATIENCE

    def made_here(self) -> nn.Module:
        chance.seed(self.job.seed)
        return self.job.model() if self.model is None else deepcopy(self.model)

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
            predicted, how = tried.process_bytes * MARGIN, f"and time from a trial of {GROUP_STEPS} steps by {self.devices} workers"
            seconds = tried.step_seconds if agrees(one.techniques) in ALIKE else seconds
        else:
            predicted, how = self.process(one, log)
        steps = sum(1 for _, moment in log.marks if moment.phase == "update")
        sent, sent_by_others = self.sent(one, log)
        return Plan(
            one.techniques, highest.bytes, int(predicted), seconds, one.exactness,
            sum(log.flops.values()) / max(steps, 1), float(log.moved[-1]) if log.moved else one.ledger.traffic,
            sent, self.devices, f"{highest.moment.phase} of {highest.moment.block or 'all weights'}",
            highest.parts, self.sure(one, how), log.stored, disk_speed(one.ledger), sent_by_others, by_block(log),
        )

    def sure(self, one: Candidate, how: str) -> str:
        """How the figures of a plan are known; `how`: that of its process."""
        tensors = self.how_real() if one.techniques in self.measured else one.ledger.sure
        return f"{tensors}; process {how}{self.changed_by(one)}"

    def how_real(self) -> str:
        """How we know what was rehearsed on real tensors."""
        return f"measured on real tensors and the first batches alone, because fake ones could not run it ({self.guessed})"

    def changed_by(self, one: Candidate) -> str:
        """What splitting the batch changes in this plan, to be told with it."""
        splitting = [text(technique) for technique in one.techniques if splits(technique, one.ledger)]
        return f"; {' and '.join(splitting)} changes the result: {self.reasons['mixes samples']}" if splitting else ""

    def sent(self, one: Candidate, log: Log) -> tuple[float, float]:
        """Bytes that the first worker sends a step, with what workers agree on after it; and where the others send something else, what
        each of them sends in a step of its own. The mean of all steps where not all are alike, each kind rehearsed."""
        uniting = next((technique for technique in one.techniques if technique.unites), None)
        if self.devices == 1 or uniting is None:
            return 0.0, 0.0
        if uniting.serves:
            return float(self.log(one.techniques, rank=0).sent[-1]), float(log.sent[-1])
        told = agreement_bytes(self.devices) if agrees(one.techniques) else 0
        kinds = uniting.talking(self.job.steps)
        if not kinds:
            return float(log.sent[-1] + told), 0.0
        others = [technique for technique in one.techniques if technique is not uniting]
        total = sum(count * (self.log(in_order((*others, kind))).sent[-1] + told) for kind, count in kinds.items() if count)
        return total / max(self.job.steps, 1), 0.0

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
        return (tried.process_bytes + belonging) * MARGIN, f"from a trial of {TRIAL_STEPS} steps"

    def tries_group(self, log: Log) -> bool:
        """Whether plans are tried by all workers: they are all here, and can run a whole step."""
        anchor = self.found_anchors.get("")
        return self.devices == self.here > 1 and anchor is not None and not anchor.sampled and self.has_room(log)

    def has_room(self, log: Log) -> bool:
        """Whether all workers here can be run at once with this log."""
        return self.here * (peak(log).bytes * 1.35 + 5e8) < memory_free()

    def trial(self, techniques: tuple[Technique, ...], steps: int, together: bool = False) -> TrialResult:
        """What some real steps take; `together`: by workers that talk to each other."""
        assert self.worker is not None, "trials run in a child process"
        self.trials += 1
        return self.worker(TrialTask(**self.about_job(techniques), steps=steps, together=together),
                           {**self.hardware.environment, **environment(techniques)})

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
        if self.devices > 1 and (reason := simplest[0].refusal(ledger)):
            raise Mistake(f"this job can't be trained by several workers: {reason}")
        plain = self.rehearsed(candidate(simplest, total_cost(simplest, ledger), stated(simplest, ledger)))
        if forced is not None:
            chosen = self.forced(ledger, forced) if forced != simplest else plain
            self.check_exact(chosen)
            return Outcome(chosen, plain, (), 1, int(chosen.process_bytes <= budget), self.elapsed(), budget, (), ())
        everything = list(candidates(ledger, self.catalogue, self.levels[-1]))
        if not everything:
            raise Mistake(self.why_none(plain, ledger))
        for level in self.tiers(everything):   # what is closer to plain training comes first, though it may be slower
            found = [one for one in everything if one.exactness <= level]
            self.trials = 0
            ranked = best_first(found, budget * 1.03, self.chosen_again(ledger, level))
            fitting, passed = self.first_fitting(ranked, budget, plain)
            best = fitting or self.nearest(found, passed, plain)   # the ledger may have been too careful
            if best.process_bytes <= budget:
                return Outcome(
                    best, plain, self.runners_up(ranked, best, passed), len(found), len(ranked), self.elapsed(), budget,
                    self.more(found, best, budget), self.refusals(ledger, level),
                )
        raise self.over_budget(ledger, found, budget, best)

    def tiers(self, found: list[Candidate]) -> list[Exactness]:
        """The allowed levels that add a plan to those before them."""
        there = {one.exactness for one in found}
        return [level for before, level in zip((-1, *self.levels), self.levels, strict=False)
                if any(before < one <= level for one in there)]

    @property
    def levels(self) -> tuple[Exactness, ...]:
        return allowed(self.exact, self.inexact)

    def check_exact(self, plan: Plan) -> None:
        """Refuse a plan that the user wrote and that is further from plain training than they allow."""
        if self.exact and plan.exactness > self.levels[-1]:
            raise Mistake(f"{plan} is {plan.exactness.word} for this job ({plan.exactness.meaning}), and --exact {self.exact} allows "
                          f"{self.levels[-1].word}: leave it out, or give {plan.exactness.flag}")

    def why_none(self, plain: Plan, ledger: Ledger) -> str:
        """Why no way to unite workers may be used."""
        why = self.why_changed(plain.techniques[0], ledger)
        return (f"{self.devices} workers that share a batch train this model{why} to what is {plain.exactness.word}: "
                f"{plain.exactness.meaning}; give {plain.exactness.flag} to allow it, or train with one worker")

    def forced(self, ledger: Ledger, forced: tuple[Technique, ...]) -> Plan:
        one = asked_for(in_order(forced), ledger)
        try:
            plan = self.attempted(one)
        except Mistake as error:
            raise Mistake(f"{' + '.join(map(text, one.techniques))} can't be used for this job: {error}") from error
        return replace(plan, sure="; ".join((plan.sure, *self.useless(plan))))

    def useless(self, plan: Plan) -> Iterator[str]:
        """Of every technique of a plan that is to save memory and saves none, that it does not."""
        for technique in plan.techniques:
            rest = tuple(one for one in plan.techniques if one is not technique)
            if isinstance(technique, SAVING):
                without = peak(self.log(rest) if rest else self.plain_log)
                if plan.peak_bytes >= without.bytes:
                    yield (f"{text(technique)} saves nothing here: the peak of tensors is {bytes_text(plan.peak_bytes)} with it, in the "
                           f"{plan.where}, and {bytes_text(without.bytes)} without")

    def chosen_again(self, ledger: Ledger, most: Exactness) -> Candidate | None:
        """The plan that was chosen earlier for the same question, by this ledger; none if there was none, or it is not allowed now."""
        if self.earlier is None or conflict(self.earlier) or not {type(one) for one in self.earlier} <= set(self.catalogue):
            return None
        with suppress(Mistake):
            one = asked_for(self.earlier, ledger)
            return one if one.exactness <= most else None
        return None

    def attempted(self, one: Candidate) -> Plan:
        """A candidate with its exact figures; whatever goes wrong on the way is told as a Mistake."""
        try:
            return self.rehearsed(one)
        except Mistake:
            raise
        except Exception as error:
            raise Mistake(f"it fails when it is rehearsed: {failure(error)}") from error

    def culprit(self, techniques: tuple[Technique, ...]) -> frozenset[str]:
        """The kind of plans that can't be rehearsed because this one can't: those with one of its techniques, or with all of them."""
        for technique in techniques if len(techniques) > 1 and self.devices == 1 else ():
            try:
                self.log((technique,))
            except Exception:
                return kind_of((technique,))
        return kind_of(techniques)

    def has_failed(self, one: Candidate) -> bool:
        return bool(self.failed) and any(kind <= kind_of(one.techniques) for kind in self.failed)

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
            if self.has_failed(one):
                continue
            try:
                plan = plain if one.techniques == plain.techniques else self.attempted(one)
            except Mistake as error:   # only a rehearsal shows that a technique can't be used for this model
                passed.append((sketched(one), str(error)))
                self.failed[self.culprit(one.techniques)] = str(error)
                continue
            if needs_trial and plan.process_bytes <= budget:
                plan = self.tried_again(plan, budget)
            if plan.process_bytes <= budget:
                return plan, passed
            worse[kind] = max(plan.process_bytes / one.process, worse.get(kind, 0.0))
            passed.append((plan, f"needs {bytes_text(plan.process_bytes)} when rehearsed, "
                                 f"{bytes_text(plan.process_bytes - budget)} too much"))
            if len(passed) > FINALISTS:
                break
        return None, passed

    def tried_again(self, plan: Plan, budget: int) -> Plan:
        """A plan whose process was tried, with the largest of some more trials if another run might not fit the budget."""
        if not plan.techniques or "from a trial" not in plan.sure or self.devices > 1:
            return plan
        for _ in range(AGAIN):
            if not plan.process_bytes <= budget < SPREAD * plan.process_bytes:
                break
            more = int(self.trial(plan.techniques, TRIAL_STEPS).process_bytes * MARGIN)
            plan = replace(plan, process_bytes=max(plan.process_bytes, more))
        return plan

    def trials_worth(self, one: Candidate, sure: float) -> int:
        """Real trials to spend before a candidate is passed over; `sure`: seconds of the best plan that needs none."""
        if self.found_anchors[""].sampled:   # a whole step can't be run here, so nothing can be tried
            return 0
        return MORE_TRIALS if one.seconds * WORTH < sure else TRIALS

    def unpredictable(self, one: Candidate) -> bool:
        return "" in self.found_anchors and not any(technique.predictable for technique in one.techniques)

    def runners_up(self, ranked: list[Candidate], chosen: Plan, passed: list[tuple[Plan, str]]) -> tuple[tuple[Plan, str], ...]:
        """Those passed over, and the best of every other kind of plan."""
        kinds = {kind_of(chosen.techniques)} | {kind_of(plan.techniques) for plan, _ in passed}
        found = [(plan, why) for plan, why in passed if not why.startswith("needs ")]
        found += [(plan, why) for plan, why in passed if why.startswith("needs ")][:3]
        same = next((one for one in ranked if one.techniques == chosen.techniques), None)   # the chosen one by the ledger too
        seconds, process = (same.seconds, same.process) if same is not None else (chosen.step_seconds, chosen.process_bytes)
        for one in ranked:
            if kind_of(one.techniques) not in kinds and one.seconds >= seconds and not self.has_failed(one):
                kinds.add(kind_of(one.techniques))
                found.append((sketched(one), why_behind(one, seconds, process, len(chosen.techniques))))
            if len(found) >= 5:
                break
        return tuple(found)

    def more(self, found: list[Candidate], chosen: Plan, budget: int) -> tuple[Plan, ...]:
        """The next faster plans that more memory would allow, by the ledger."""
        steps: list[Plan] = []
        fastest = 0.98 * chosen.step_seconds
        for one in sorted(found, key=lambda one: one.process):
            if one.process > budget and one.seconds < fastest and not self.has_failed(one):
                steps.append(sketched(one))
                fastest = 0.95 * one.seconds
        return tuple(steps[:3])

    def refusals(self, ledger: Ledger, most: Exactness) -> tuple[tuple[str, str], ...]:
        """Techniques of which no setting could be used, and why."""
        found = []
        for kind in self.catalogue:
            if self.devices == 1 and kind.unites:   # nobody asked for other workers
                continue
            tried = kind.choices(ledger) or ((kind(),) if kind in (Precision, Spill) else ())
            levels = [one.exactness(ledger) for one in tried]
            reasons = [one.refusal(ledger) or (f"{level.word} for this model{self.why_changed(one, ledger)}: {level.flag} allows it"
                                                if level > most else "") for one, level in zip(tried, levels, strict=True)]
            if reasons and all(reasons):
                found.append((kind.__name__, reasons[0]))
        return tuple(found)

    def why_changed(self, one: Technique, ledger: Ledger) -> str:
        return f" ({self.reasons['mixes samples']})" if splits(one, ledger) else ""

    def nearest(self, found: list[Candidate], passed: list[tuple[Plan, str]], plain: Plan) -> Plan:
        """The least demanding plan there is, rehearsed."""
        least = sorted(found, key=lambda one: (one.process, one.seconds))
        sure = [one for one in least if not self.unpredictable(one)] or least
        plans = [plan for plan, why in passed if why.startswith("needs ")]
        more = len(plans) + 3
        for one in sure:
            if len(plans) == more:
                break
            if self.has_failed(one):
                continue
            try:
                plans.append(self.attempted(one))
            except Mistake as error:
                passed.append((sketched(one), str(error)))
                self.failed[self.culprit(one.techniques)] = str(error)
        return min((*plans, plain), key=lambda plan: plan.process_bytes)

    def over_budget(self, ledger: Ledger, found: list[Candidate], budget: int, nearest: Plan) -> OverBudget:
        """The refusal, with the least demanding plan and what further levels would buy."""
        hint = "".join(self.bought(ledger, level, nearest) for level in Exactness if self.levels[-1] < level < Exactness.CHANGED)
        hint += "" if self.inexact else f"; {Exactness.CHANGED.flag} allows what is {Exactness.CHANGED.word}, such as 16-bit precision"
        return OverBudget(
            f"nothing fits {bytes_text(budget)}: {len(found):,} combinations were tried and the least that works is "
            f"{bytes_text(nearest.process_bytes)} for the whole process, with {nearest} "
            f"({nearest.exactness.word}, {seconds_text(nearest.step_seconds)} a step){hint}", nearest)

    def bought(self, ledger: Ledger, level: Exactness, nearest: Plan) -> str:
        """What the plans of a further level would need, by the ledger; nothing if that is no less."""
        there = (one for one in candidates(ledger, self.catalogue, level) if one.exactness == level)
        least = min(there, key=lambda one: one.process, default=None)
        if least is None or least.process >= nearest.process_bytes:
            return ""
        return (f"; {level.flag} ({level.word}) allows {sketched(least)}, which needs {bytes_text(least.process)} by the ledger "
                f"({seconds_text(least.seconds)} a step)")

    def elapsed(self) -> float:
        return time.perf_counter() - self.begun


def stated(techniques: tuple[Technique, ...], ledger: Ledger) -> Exactness:
    """How close these techniques, in their order, stay to plain training."""
    now, level = ledger, Exactness.BITS
    for technique in techniques:
        level, now = max(level, technique.exactness(now)), technique.cost(now)
    return level


def asked_for(techniques: tuple[Technique, ...], ledger: Ledger) -> Candidate:
    """These techniques as a candidate; refused with the reason if one can't be used."""
    now = ledger
    for technique in techniques:
        reason = technique.refusal(now)
        if reason:
            raise Mistake(f"{text(technique)} can't be used for this job: {reason}")
        now = technique.cost(now)
    return candidate(techniques, now, stated(techniques, ledger))


def largest_worker(job: Job, devices: int) -> int:
    """The worker with the largest part of a batch, which is the last one, or where parts are equal of the state, which is the first."""
    batch = first_batch(job)
    count = job.count(batch)
    if count < devices:
        raise Mistake(f"batches of {count} samples for {devices} workers: some would have none; give a batch of {devices} samples or more, "
                      f"or fewer --devices")
    if job.split is not None:
        parts = [float(job.weight(piece)) for piece in job.pieces(batch, devices)]
        return parts.index(max(parts))
    return devices - 1 if count % devices else 0


def agrees(techniques: tuple[Technique, ...]) -> float:
    """After which share of the steps workers agree."""
    return next((technique.agrees for technique in techniques if technique.unites), 1.0)


def splits(technique: Technique, ledger: Ledger) -> bool:
    """Whether a technique would be exact, if only the samples of a batch had nothing to do with each other."""
    apart = replace(ledger, traits=ledger.traits - {"mixes samples"})
    return "mixes samples" in ledger.traits and technique.exactness(apart) < technique.exactness(ledger)


def why_behind(one: Candidate, seconds: float, process: float, techniques: int) -> str:
    """Why a candidate stands behind the chosen plan, whose figures by the same ledger these are."""
    slower = one.seconds / seconds - 1 if seconds else 0.0
    if slower >= 0.005:
        return f"{slower:.0%} slower"
    return "no faster, and larger" if one.process > process else "no faster, and more techniques" if len(one.techniques) > techniques \
        else "as fast"


def kind_of(techniques: tuple[Technique, ...]) -> frozenset[str]:
    """The names of a plan's techniques; allocators differ by more than a knob."""
    return frozenset(text(one) if isinstance(one, Allocator) else type(one).__name__ for one in techniques)


def sketched(one: Candidate) -> Plan:
    """A candidate with the ledger's figures."""
    return Plan(one.techniques, int(one.peak), int(one.process), one.seconds, one.exactness,
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


def failure(error: BaseException) -> str:
    """What went wrong, in a line."""
    return first_line(error) if isinstance(error, Mistake) else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


