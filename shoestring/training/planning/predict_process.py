"""Prediction of the size of a process: by rule from the anchor step, or from a trial of a few real steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoestring.core.budget import Budget
from shoestring.core.errors import Crashed
from shoestring.measure.holdings import Holders
from shoestring.measure.process import memory_free, status
from shoestring.measure.timeline import peak, stretches, with_filled_workspaces
from shoestring.measure.tracker import Log
from shoestring.planning.plan import techniques_text
from shoestring.training.evidence.anchor import resident_bytes
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import TrialResult, TrialTask
from shoestring.training.planning.axes import is_divided
from shoestring.training.planning.plan import Combination, ProcessBasis, Techniques, TrainingPlan
from shoestring.training.planning.process_figure import ProcessFigure, expected_process, overhead, process_estimate
from shoestring.training.technique import environment

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
SPREAD = (
    1.04  # between two trials of one plan (threads race for memory). A plan this close to the budget is tried again,
)
AGAIN = 2  # this often
FEW_SPREAD = 1.12  # the same for plain training, which the anchor ran for few steps while kept memory still grows
VARIED_SPREAD = 1.15  # the same between two runs with batches of several sizes, under an allocator without a rule
NOT_HERE = "the hardware is not here"


@dataclass
class ProcessPredictor:
    rehearsals: Rehearsals
    evidence: Evidence
    devices: int = 1  # workers that train together,
    here: int = 1  # and how many of them are on this machine
    trials: int = 0  # number of trials so far

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
                or is_divided(one.techniques, self.devices)
            ):
                return ProcessFigure((most + belonging) * MARGIN, ProcessBasis.ANCHOR, how)
            # Libraries keep memory for every size that they have met, which follows no rule
            tried = self.trial(one.techniques, count := self.trial_steps(one.known["step_seconds"]))
            size = max((most + belonging) * MARGIN, (tried.process_bytes + belonging) * self.margin)
            return ProcessFigure(size, ProcessBasis.TRIAL, f"{how}, and a trial of {count} steps")
        if is_divided(one.techniques, self.devices):  # a single worker would lack the rest of its line
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
