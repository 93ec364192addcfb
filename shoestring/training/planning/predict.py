"""Prediction: turn a candidate into a plan with exact figures. Tensors are rehearsed; process size follows by rule or
from a trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, prod

from shoestring.core.budget import Budget
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Crashed, Mistake, reason_text
from shoestring.core.job import interval
from shoestring.core.technique import drift, in_order, text
from shoestring.core.workers.coordinates import coordinates
from shoestring.core.workers.link import Link, agreement_bytes
from shoestring.core.workers.mesh import imagined_mesh, on_one_axis
from shoestring.core.workers.staging import RankFigures
from shoestring.data.feed import Feed
from shoestring.measure.holdings import Holders
from shoestring.measure.load import HELD_UP
from shoestring.measure.process import memory_free, status
from shoestring.measure.timeline import last_step, peak, stretches, validation, with_filled_workspaces
from shoestring.measure.tracker import VALIDATE, Log, Moment
from shoestring.planning.plan import techniques_text
from shoestring.planning.room import Candidate
from shoestring.training.evidence.anchor import resident_bytes
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.held_out import looked_through, with_own
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import TrialResult, TrialTask
from shoestring.training.evidence.trials.stage_trials import StagedTrials
from shoestring.training.group_technique import mesh_sizes, uniting
from shoestring.training.planning.axes import kinds_of_workers, staging
from shoestring.training.planning.plan import ProcessBasis, TrainingDetails, TrainingPlan, training_plan
from shoestring.training.planning.process_figure import ProcessFigure, expected_process, overhead, process_estimate
from shoestring.training.technique import TrainingTechnique, environment

Techniques = tuple[TrainingTechnique, ...]
Combination = Candidate[TrainingTechnique, Ledger]

SLACK = 1.05  # factor for the device allocator's overhead, where that can't be measured
MARGIN = 1.02  # factor on the predicted process: better two percent too much than a run over its budget
VARIED_MARGIN = 1.04  # the same for a process that was tried with batches of several sizes
TRIAL_STEPS, TRIAL_SECONDS = (
    (4, 12),
    2.0,
)  # fewest and most steps of a trial: the memory that an allocator keeps grows in the first steps
VARIED_STEPS, VARIED_SECONDS = (
    (10, 32),
    8.0,
)  # more if batches differ in size, because the kept memory depends on earlier batches
GROUP_STEPS = 8  # steps of a trial by all workers, which are timed too
SPREAD = (
    1.04  # between two trials of one plan (threads race for memory). A plan this close to the budget is tried again,
)
AGAIN = 2  # this often
FEW_SPREAD = 1.12  # the same for plain training, which the anchor ran for few steps while kept memory still grows
VARIED_SPREAD = 1.15  # the same between two runs with batches of several sizes, under an allocator without a rule
APART = 8  # rehearse so many workers one by one if they send different amounts; of a larger group, one of each kind
MOST_EVENTS = 150_000  # in a log: about ten seconds of rehearsing
NOT_HERE = "the hardware is not here"
ALIKE = (0.0, 1.0)  # if workers synchronise after every step or never, all steps cost the same, so one may be timed


@dataclass
class Predictor:
    rehearsals: Rehearsals
    evidence: Evidence
    devices: int = 1  # workers that train together,
    here: int = 1  # and how many of them are on this machine
    trials: int = 0  # number of trials so far
    limit: float = inf  # bytes of tensors: if one worker of a plan needs more, the plan is not examined further
    rehearsed: dict[Techniques, tuple[tuple[RankFigures, ...], Log]] = field(
        default_factory=dict
    )  # every kind of worker of a plan
    staged: StagedTrials = field(default_factory=StagedTrials)

    def plan(self, one: Combination) -> TrainingPlan:
        """A candidate with its exact figures."""
        if self.too_long(one.techniques):
            cut = staging(one.techniques, self.evidence.ledger)
            found = self.sketch(one).with_details(
                mesh=self.mesh(one.techniques), staging=cut, speeds=self.rehearsals.job.link.speeds
            )
            return replace(
                found,
                basis=f"by the ledger alone: rehearsing every piece of every kind of worker would take minutes; {NOT_HERE}",
            )
        divided = self.is_divided(one.techniques)
        ranks, log = self.by_rank(one.techniques) if divided else ((), self.log(one.techniques))
        untried = self.staged.check(
            self.rehearsals, self.evidence, one.techniques
        )  # tried before workers that may wait for each other
        highest = peak(log)
        if self.rehearsals.job.validates and any(
            technique.serves for technique in uniting(one.techniques)
        ):  # there only the first worker validates
            highest = max(highest, peak(self.log(one.techniques, rank=0)), key=lambda found: found.bytes)
        seconds = one.known["step_seconds"]
        if divided and not ranks:
            process = process_estimate(
                max(one.known["process_bytes"], highest.bytes), ": its tensors alone are too many"
            )
        elif self.tries_group(log):
            tried = self.trial(one.techniques, GROUP_STEPS, together=True)
            process = ProcessFigure(
                tried.process_bytes * MARGIN,
                ProcessBasis.TRIAL,
                f"and time from a trial of {GROUP_STEPS} steps by {self.devices} workers",
            )
            seconds = tried.step_seconds if agrees(one.techniques) in ALIKE else seconds
        else:
            process = self.process(one, log)
        steps, cut = (
            sum(1 for _, moment in log.marks if moment.phase == "update"),
            staging(one.techniques, self.evidence.ledger),
        )
        sent, sent_by_others = (ranks[0].sent_bytes, 0.0) if ranks else self.bytes_sent(one.techniques, log)
        return self.with_validation(
            one.cost,
            training_plan(
                one.techniques,
                one.exactness,
                TrainingDetails(
                    world=self.devices,
                    where=place_of(highest.moment),
                    parts=dict(highest.parts),
                    disk_speed=disk_speed(one.cost),
                    mesh=self.mesh(one.techniques),
                    process_basis=process.basis,
                    staging=cut and cut.slower(seconds / max(one.known["step_seconds"], 1e-12)),
                    ranks=ranks,
                    blocks=by_block(log),
                    lengths=self.rehearsals.lengths,
                    speeds=self.rehearsals.job.link.speeds,
                ),
                self.basis(one, process.how) + untried + self.validation_remark(log),
                peak_bytes=highest.bytes,
                process_bytes=int(process.bytes),
                step_seconds=seconds,
                flops=sum(log.flops.values()) / max(steps, 1),
                traffic_bytes=float(log.moved[-1]) if log.moved else one.cost.traffic.disk,
                sent_bytes=sent,
                stored_bytes=log.stored,
                sent_by_others_bytes=sent_by_others,
                drift=stated_drift(one.techniques, self.evidence.ledger),
            ),
        )

    def log(self, techniques: Techniques, rank: int | None = None) -> Log:
        """The log of a rehearsal, including what the job's own validation was measured to allocate."""
        if rank is None and self.is_divided(techniques):
            return self.by_rank(techniques)[1]
        found = self.rehearsals.log(techniques, rank) if techniques or rank is not None else self.evidence.plain
        anchor = self.evidence.anchor
        return found if anchor is None else with_own(found, anchor.validation_bytes)

    def too_long(self, techniques: Techniques) -> bool:
        """Whether rehearsing a cluster that is not here takes too long: every micro-batch costs as much as a whole
        batch."""
        pieces = prod(one.parts for one in techniques if one.splits_batch)
        return self.rehearsals.hardware.described and pieces * len(self.evidence.plain.events) > MOST_EVENTS

    def is_divided(self, techniques: Techniques) -> bool:
        """Whether workers hold different parts of the model, so that each must be rehearsed to find the one that needs
        most."""
        return self.devices > 1 and any(one.unites != "data" for one in uniting(techniques))

    def by_rank(self, techniques: Techniques) -> tuple[tuple[RankFigures, ...], Log]:
        """The figures of every kind of worker, the first worker's first; and the log of the one that needs most. For a
        plan over the limit: no figures, and the log of the worker that exceeds it."""
        if techniques in self.rehearsed:
            return self.rehearsed[techniques]
        sizes, told = self.mesh(techniques), staging(techniques, self.evidence.ledger)
        kinds = kinds_of_workers(self.rehearsals.job, sizes, serves=False)
        if told is not None:  # try the neediest by arithmetic first
            kinds.sort(key=lambda ranks: -told.memory[coordinates(sizes, ranks[0])["stage"]])
        found, logs = [], []
        for ranks in kinds:
            logs.append(log := self.log(techniques, ranks[0]))
            if peak(log).bytes > self.limit:
                return (), log
            found.append(RankFigures(ranks, peak(log).bytes, self.bytes_sent(techniques, log, ranks[0])[0]))
            logs = [max(logs, key=lambda log: peak(log).bytes)]
        self.rehearsed[techniques] = tuple(sorted(found, key=lambda one: one.ranks)), logs[0]
        return self.rehearsed[techniques]

    def mesh(self, techniques: Techniques) -> Mapping[str, int]:
        """The sizes of the plan's mesh; empty for one worker."""
        return mesh_sizes(techniques, self.devices) if self.devices > 1 else {}

    def with_validation(self, cost: Ledger, plan: TrainingPlan) -> TrainingPlan:
        """The plan with the seconds of a validation and, if the number of steps is known, of the whole training with
        all validations."""
        job, each = self.rehearsals.job, cost.validation_seconds
        if not each:
            return plan
        feed = Feed(replace(job, mesh=on_one_axis()))
        total, (number, unit) = feed.steps_in_all, interval(job.every)
        if not total or (unit == "epochs" and not feed.per_epoch):
            return plan.predicting(validation_seconds=each)
        step_seconds = plan.predicted["step_seconds"]
        apart = number * feed.per_epoch if unit == "epochs" else number / step_seconds if unit == "seconds" else number
        count = max(-(-total // max(apart, 1.0)), 1.0)  # there is always one at the end
        return plan.predicting(validation_seconds=each, training_seconds=total * step_seconds + count * each)

    def validation_remark(self, log: Log) -> str:
        """A remark about a validation that was not rehearsed to its end, or for which not all data were seen."""
        job = self.rehearsals.job
        if log.unvalidated:
            until = (
                "not part of the tensors"
                if job.validate is not None
                else "part of the tensors up to where fake ones could not run it"
            )
            return f"; validation is {until} ({log.unvalidated})"
        if job.held_out is None or (found := looked_through(job)).ended:
            return ""
        return f"; validation by the largest of the first {found.batches} held-out batches"

    def attempt(self, one: Combination) -> TrainingPlan:
        """The same as `plan`, with every failure as a Mistake."""
        try:
            return self.plan(one)
        except Mistake:
            raise
        except Crashed as error:  # in a trial
            raise Mistake(str(error)) from error
        except Exception as error:
            raise Mistake(f"it fails when it is rehearsed: {reason_text(error)}") from error

    def sketch(self, one: Combination) -> TrainingPlan:
        """A candidate with the ledger's figures only."""
        known, cost = one.known, one.cost
        plan = training_plan(
            one.techniques,
            one.exactness,
            TrainingDetails(world=self.devices, disk_speed=disk_speed(cost)),
            "by the ledger alone, not rehearsed",
            peak_bytes=int(known["peak_bytes"]),
            process_bytes=int(known["process_bytes"]),
            step_seconds=known["step_seconds"],
            flops=cost.flops,
            traffic_bytes=cost.traffic.disk,
            sent_bytes=cost.traffic.sent,
            drift=stated_drift(one.techniques, self.evidence.ledger),
        )
        return self.with_validation(cost, plan)

    def basis(self, one: Combination, how: str) -> str:
        """The basis of a plan's figures, and how splitting the batch changes the result; `how`: how its process is
        known."""
        tensors = self.rehearsals.how_real() if one.techniques in self.rehearsals.measured else one.cost.findings.basis
        splitting = [text(technique) for technique in one.techniques if splits(technique, one.cost)]
        reasons = self.evidence.ledger.findings.reasons
        changed = f"; {' and '.join(splitting)} changes the result: {reasons['mixes samples']}" if splitting else ""
        adding = self.how_added(one.techniques)
        return "; ".join((f"{tensors}; process {how}{changed}", *[adding] * bool(adding), *self.about_data()))

    def about_data(self) -> Iterator[str]:
        """Caveats of the figures: a busy machine, batches of different sizes, data loaded by other processes."""
        lengths, job, anchor = self.rehearsals.lengths, self.rehearsals.job, self.evidence.anchor
        if anchor is not None and anchor.busy > HELD_UP:
            yield (
                f"times measured while other processes held up the steps ({anchor.busy:.0%} of the time they waited for a core), which "
                "is taken off: less sure, and measured again next time"
            )
        if lengths.planned_for:
            yield lengths.planned_for
        if lengths.looked and job.largest is not None:
            timed = anchor is not None and not anchor.sampled
            yield (
                f"times for one in the middle, batch {lengths.typical}"
                if timed
                else "times for that one too, which are the longest"
            )
        if lengths.beside:
            yield lengths.beside

    def with_ranks(self, plan: TrainingPlan) -> TrainingPlan:
        """A group's plan with the figures of every kind of worker, each rehearsed once; unchanged if that is
        impossible."""
        job = self.rehearsals.job
        if self.devices == 1 or self.rehearsals.real or plan.details.ranks or self.too_long(plan.techniques):
            return plan
        serves, alike = any(technique.serves for technique in uniting(plan.techniques)), self.alike(plan.techniques)
        found = []
        with suppress(Exception):  # the plan is usable without them
            each = [(rank,) for rank in range(self.devices)] if not alike and self.devices <= APART else None
            for ranks in each or kinds_of_workers(job, self.mesh(plan.techniques), serves):
                if job.link.rank in ranks and not serves and (alike or job.link.rank == ranks[0] == 0):
                    found.append(RankFigures(ranks, int(plan.predicted["peak_bytes"]), plan.predicted["sent_bytes"]))
                    continue
                log = self.log(plan.techniques, rank=ranks[0])
                sent = float(log.sent[-1]) if serves else self.bytes_sent(plan.techniques, log, ranks[0])[0]
                found.append(RankFigures(ranks, peak(log).bytes, sent))
            return plan.with_details(ranks=tuple(found))
        return plan

    def bytes_sent(self, techniques: Techniques, log: Log, rank: int | None = None) -> tuple[float, float]:
        """Bytes that the first worker sends per step, with the agreement after it; and, if the other workers send
        something else, what each of them sends in a step of its own. If steps differ, the mean over all, each kind of
        step rehearsed."""
        united = sorted(uniting(techniques), key=lambda one: one.unites != "data")
        if self.devices == 1 or not united:
            return 0.0, 0.0
        first = united[0]  # along data if there are several replicas: the other axes communicate in every step
        if first.serves:
            return float(self.rehearsals.log(techniques, rank=0).sent[-1]), float(log.sent[-1])
        place = self.rehearsals.job.link
        if rank is None and place.rank and not self.alike(techniques):
            rank = 0
            log = self.rehearsals.log(techniques, rank)
        told = (
            agreement_bytes(
                Link(place.rank if rank is None else rank, place.world, place.same_machine, speeds=place.speeds)
            )
            if agrees(techniques)
            else 0
        )
        total_steps = self.rehearsals.job.steps
        kinds = first.talking(total_steps)
        if not kinds:
            return float(log.sent[-1] + told), 0.0
        others = [technique for technique in techniques if technique is not first]
        total = sum(
            count * self.rehearsals.log(in_order((*others, kind)), rank).sent[-1]
            for kind, count in kinds.items()
            if count
        )
        total += told * first.agreements(total_steps)
        return total / max(total_steps, 1), 0.0

    def alike(self, techniques: Techniques) -> bool:
        """Whether all workers send equally much in all-reduces, along every axis."""
        place = self.rehearsals.job.link
        mesh = imagined_mesh(mesh_sizes(techniques, self.devices), speeds=place.speeds)
        return all(link.sums.alike for link in (mesh.link, *mesh.axes.values()))

    def how_added(self, techniques: Techniques) -> str:
        """The all-reduce algorithm of every axis, in words; empty if speeds were neither measured nor described."""
        mesh = imagined_mesh(mesh_sizes(techniques, self.devices), speeds=self.rehearsals.job.link.speeds)
        told = dict.fromkeys(str(mesh.along(axis).sums) for axis, size in mesh.sizes.items() if size > 1)
        return "; ".join(text for text in told if text)

    def process(self, one: Combination, log: Log) -> ProcessFigure:
        """Bytes of the process, and how we know."""
        anchor, hardware, model = self.evidence.anchor, self.rehearsals.hardware, self.rehearsals.model
        by_rule = any(technique.predictable for technique in one.techniques)
        belonging = hardware.links.get(str(self.devices), (0.0, 0.0, 0.0))[
            2
        ]  # bytes of a process for being part of a group
        if hardware.described:
            return process_estimate(peak(log).bytes * SLACK + hardware.base, f" from the tensors: {NOT_HERE}")
        if self.rehearsals.worker is None:
            held = Holders(self.rehearsals.job, original=model).real_bytes()
            return process_estimate(
                status("VmRSS") + (peak(log).bytes - held) * 1.35, " from this process and its tensors"
            )
        if anchor is None or (anchor.sampled and not by_rule):
            return process_estimate(one.known["process_bytes"], ": no real step could be run here")
        if by_rule:
            base = min(anchor.overheads.values())
            most = max(
                stretch.top + overhead(anchor.overheads, stretch.moment, base)
                for stretch in list(stretches(with_filled_workspaces(log, anchor.filled), resident_bytes))[1:]
            )
            how = "from the anchor step and every tensor's pages"
            if (
                not self.rehearsals.lengths.varies
                or anchor.sampled
                or not self.has_room(log)
                or self.is_divided(one.techniques)
            ):
                return ProcessFigure((most + belonging) * MARGIN, ProcessBasis.ANCHOR, how)
            # Libraries keep memory for every size that they have met, which follows no rule
            tried = self.trial(one.techniques, count := self.trial_steps(one.known["step_seconds"]))
            size = max((most + belonging) * MARGIN, (tried.process_bytes + belonging) * self.margin)
            return ProcessFigure(size, ProcessBasis.TRIAL, f"{how}, and a trial of {count} steps")
        if self.is_divided(one.techniques):  # a single worker would lack the rest of its line
            size = max(one.known["process_bytes"], peak(log).bytes + min(anchor.overheads.values()))
            return process_estimate(size, ": not all workers are here")
        if not one.techniques and not anchor.eased and not self.rehearsals.lengths.varies:
            return ProcessFigure(anchor.process * self.margin, ProcessBasis.ANCHOR, "from the anchor step")
        if not self.has_room(log):
            return process_estimate(one.known["process_bytes"], ": this machine has no room to try it")
        count = self.trial_steps(one.known["step_seconds"])
        tried = self.trial(one.techniques, count)
        if not one.techniques and not anchor.eased:  # two ways to estimate the kept memory; the larger counts
            size = max(tried.process_bytes * self.margin, anchor.process)
            return ProcessFigure(size, ProcessBasis.TRIAL, f"from the anchor step and a trial of {count} steps")
        size = (tried.process_bytes + belonging) * self.margin
        return ProcessFigure(size, ProcessBasis.TRIAL, f"from a trial of {count} steps")

    def needs_trial(self, one: Combination) -> bool:
        """Whether its process follows no rule, so that only a trial shows how large it is."""
        return self.evidence.anchor is not None and not any(technique.predictable for technique in one.techniques)

    def tries_group(self, log: Log) -> bool:
        """Whether plans are tried with all workers: they are all on this machine, and can run a whole step."""
        anchor = self.evidence.anchor
        return self.devices == self.here > 1 and anchor is not None and not anchor.sampled and self.has_room(log)

    def has_room(self, log: Log) -> bool:
        """Whether all workers on this machine can run at once with this log."""
        return self.here * expected_process(log) < memory_free()

    def trial(self, techniques: Techniques, steps: int, together: bool = False) -> TrialResult:
        """The result of a few real steps; `together`: by workers that communicate."""
        self.trials += 1
        task = TrialTask(**self.rehearsals.about_job(techniques), steps=steps, together=together)
        doing = f"trying {techniques_text(techniques)} for {steps} real steps"
        try:
            return self.rehearsals.ask_worker(
                task, {**self.rehearsals.hardware.environment, **environment(techniques)}, doing
            )
        except Crashed as error:
            raise Crashed(f"{doing}: {error}") from error

    @property
    def margin(self) -> float:
        """Safety factor on a process that follows no rule. If sizes vary, the kept memory depends on the order of
        batches."""
        return VARIED_MARGIN if self.rehearsals.lengths.varies else MARGIN

    def trial_steps(self, seconds: float) -> int:
        """Steps in a trial by one worker, whose steps take `seconds`; if sizes vary, batches as they come and then the
        largest."""
        varies = self.rehearsals.lengths.varies
        least, most = VARIED_STEPS if varies else TRIAL_STEPS
        wanted = min(max(int((VARIED_SECONDS if varies else TRIAL_SECONDS) / max(seconds, 1e-3)), least), most)
        return max(min(wanted, self.rehearsals.job.steps or wanted), TRIAL_STEPS[0])

    def with_more_trials(self, plan: TrainingPlan, budget: Budget) -> TrainingPlan:
        """A plan whose process follows no rule, with the largest of some more trials if another run might exceed the
        budget."""
        if (
            plan.details.process_basis is ProcessBasis.ESTIMATED or self.devices > 1
        ):  # all workers have tried it together
            return plan
        if (
            self.rehearsals.lengths.varies
        ):  # no number of trials would show how large it may become, so it gets that margin
            largest = replace(
                plan.predicting(process_bytes=int(VARIED_SPREAD * plan.predicted["process_bytes"])),
                basis=f"{plan.basis}; counted with {VARIED_SPREAD - 1:.0%} more, by which two runs may differ where sizes vary",
            )
            only_larger_breaks = budget.broken_limits(largest.numbers()) and not budget.broken_limits(plan.numbers())
            return largest if only_larger_breaks else plan
        for _ in range(AGAIN):
            spread = SPREAD if plan.details.process_basis is ProcessBasis.TRIAL else FEW_SPREAD
            if budget.broken_limits(plan.numbers()) or not budget.broken_limits(
                {"process_bytes": spread * plan.predicted["process_bytes"]}
            ):
                break
            more = int(
                self.trial(plan.techniques, self.trial_steps(plan.predicted["step_seconds"])).process_bytes
                * self.margin
            )
            plan = plan.predicting(process_bytes=max(plan.predicted["process_bytes"], more))
        return plan


def place_of(moment: Moment) -> str:
    """A moment in words."""
    if moment.phase == VALIDATE:
        return f"validation, {moment.block or 'around its batches'}"
    return f"{moment.phase} of {moment.block or 'all weights'}"


def agrees(techniques: Techniques) -> float:
    """Fraction of steps that end in a barrier; 0 = asynchronous."""
    return next((technique.agrees for technique in uniting(techniques) if technique.unites == "data"), 1.0)


def splits(technique: TrainingTechnique, ledger: Ledger) -> bool:
    """Whether a technique would be exact if samples of a batch did not interact."""
    apart = replace(ledger, findings=replace(ledger.findings, traits=ledger.findings.traits - {Trait.MIXES_SAMPLES}))
    return ledger.has(Trait.MIXES_SAMPLES) and technique.exactness(apart) < technique.exactness(ledger)


def stated_drift(techniques: Techniques, ledger: Ledger) -> float:
    """The stated drifts of these techniques, in their order, added up."""
    now, total = ledger, 0.0
    for technique in techniques:
        total, now = total + drift(technique, now), technique.cost(now)
    return total


def disk_speed(ledger: Ledger) -> float:
    """Measured bytes per second of the disk for a step's traffic; 0 without traffic."""
    return ledger.traffic.disk / ledger.traffic.disk_seconds if ledger.traffic.disk_seconds else 0.0


def by_block(log: Log) -> tuple[tuple[str, int], ...]:
    """Highest bytes alive while each block ran, in the order of the last step."""
    tops: dict[str, int] = {}
    for stretch in (*last_step(log)[0], *validation(log)):
        name = f"{stretch.moment.phase} {stretch.moment.block}".strip()
        tops[name] = max(tops.get(name, 0), stretch.top)
    return tuple(tops.items())
