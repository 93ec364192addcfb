"""Gather the evidence about a job before anything is predicted: the ledger of its plain step, and where its figures
come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Findings, Trait
from shoestring.core.errors import reason_text
from shoestring.core.running import random_state
from shoestring.core.workers.mesh import on_one_axis
from shoestring.measure.instructions import deadly
from shoestring.measure.tracker import Log
from shoestring.training.evidence.anchor import why_not_again
from shoestring.training.evidence.real_steps import needs_of, real_steps
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.step import Anchor, first_batch, plain_ledger, unsplittable
from shoestring.training.evidence.tasks import PiecesTask
from shoestring.training.evidence.trials.pieces import try_in_pieces
from shoestring.training.group_technique import uniting
from shoestring.training.technique import TrainingTechnique as Technique


@dataclass(frozen=True)
class Evidence:
    ledger: Ledger  # of the plain step, with the ledgers of measured precisions
    plain: Log  # of the plain steps
    anchors: Mapping[str, Anchor] = field(default_factory=dict)  # measured steps by variant; "": plain
    reserved: int = 0  # bytes of address space that a worker needs above its memory

    @property
    def anchor(self) -> Anchor | None:
        return self.anchors.get("")


@dataclass
class Traits:
    """Traits of the model and the job that techniques depend on, while they are being found."""

    found: set[str]
    reasons: dict[str, str] = field(
        default_factory=dict
    )  # trait -> the observation that shows it, where messages quote it

    def note(self, trait: str, why: str) -> None:
        self.found.add(trait)
        self.reasons[trait] = why

    def note_pieces(self, rehearsals: Rehearsals, plain: Log, tried: Mapping[str, str]) -> None:
        """Note what the trial of the batch in two micro-batches found: the worker's trial, or one here if there is none
        and the model is small."""
        if Trait.MIXES_SAMPLES in self.found:
            self.reasons[Trait.MIXES_SAMPLES] = "batch norm looks at all samples of a batch at once"
        if Trait.UNSPLITTABLE in self.found or Trait.MIXES_SAMPLES in self.found:
            return
        if rehearsals.worker is None and rehearsals.fits_here(plain):
            tried = try_in_pieces(rehearsals.job, rehearsals.model_to_try)
        self.reasons |= tried
        self.found |= set(tried) - {"not tried"}

    def note_again(self, rehearsals: Rehearsals, plain: Log, again: str) -> None:
        """Note why blocks can't be recomputed: as the worker found, or by a step here if there is none and the model is
        small."""
        if rehearsals.worker is None and Trait.NO_BLOCK_RUNS not in self.found and rehearsals.fits_here(plain):
            with random_state.fork_rng():
                model = rehearsals.model_to_try()
                random_state.seed(rehearsals.job.seed)
                again = why_not_again(replace(rehearsals.job, mesh=on_one_axis()), model)
        if again:
            self.note(Trait.NOT_RECOMPUTABLE, again)


def gather_evidence(
    rehearsals: Rehearsals, variants: Iterable[Technique], only: tuple[Technique, ...] | None = None
) -> Evidence:
    """The evidence for a job; each variant is measured beside the plain step. `only`: measure just what these
    techniques need."""
    plain, hardware = rehearsals.log(()), rehearsals.hardware
    job = rehearsals.job  # planned for the batch that needs most memory, which the plain steps have found
    traits = Traits(rehearsals.traits(plain))
    half = half_of_the_batch(rehearsals, traits)
    dying = {
        one.computes_in for one in variants if one.computes_in and deadly(one.computes_in)
    }  # these dtypes crash this process, which rehearses them
    traits.found |= {f"{dtype} is deadly here" for dtype in dying}
    variants = [one for one in variants if one.computes_in not in dying]
    steps = real_steps(rehearsals, plain, variants, Trait.UNSPLITTABLE not in traits.found, needs_of(only))
    traits.found |= {f"no {dtype}" for dtype, what in hardware.dtypes.items() if what}
    if not hardware.disk:
        traits.note(Trait.NO_DISK, NO_DISK)
    traits.note_pieces(rehearsals, plain, steps.pieces)
    traits.note_again(rehearsals, plain, steps.again)
    ledger = plain_ledger(job, plain, half, hardware, steps.anchors.get(""), traits.found)
    basis = rehearsals.how_real() if rehearsals.real else ledger.findings.basis
    if "not tried" in traits.reasons:
        basis += f"; whether the batch can be split was not tried: {traits.reasons['not tried']}"
    by_precision = {}
    for variant in variants:
        try:
            log, part = logs_under(rehearsals, variant, half is not None, steps.failed.get(variant.key, ""))
        except Exception as error:
            traits.note(
                f"no {variant.computes_in}", str(error) if isinstance(error, VariantFailed) else reason_text(error)
            )
            continue
        by_precision[variant.key] = plain_ledger(job, log, part, hardware, steps.anchors.get(variant.key), traits.found)
    ledger = replace(
        ledger, by_precision=by_precision, findings=Findings(frozenset(traits.found), traits.reasons, basis)
    )
    return Evidence(ledger, plain, steps.anchors, steps.reserved)


PIECES = "trying whether a batch in two pieces gives the same numbers"


class VariantFailed(Exception):
    """A variant could not run in the worker."""


def logs_under(rehearsals: Rehearsals, variant: Technique, halved: bool, failed: str) -> tuple[Log, Log | None]:
    """The log of steps under a variant, and with half the batch; `failed`: why the worker could not run it."""
    if failed:
        raise VariantFailed(failed)
    log = rehearsals.log((variant,))
    return log, rehearsals.half_log((variant,)) if halved else None


NO_DISK = (
    'the description of the cluster does not say how fast a device\'s disk is: add "disk", bytes per second that are written and '
    'read back, such as "2GB"'
)


def half_of_the_batch(rehearsals: Rehearsals, traits: Traits) -> Log | None:
    """The log of a plain step with half the batch; None if that is impossible (which is noted) or useless."""
    job = rehearsals.job
    if Trait.UNSPLITTABLE in traits.found:
        traits.reasons[Trait.UNSPLITTABLE] = unsplittable(job)
    elif job.count(first_batch(job)) > 1 and not rehearsals.real:
        try:
            return rehearsals.half_log()
        except Exception as error:
            traits.note(Trait.UNSPLITTABLE, f"half of the batch can't be trained on: {reason_text(error)}")
    return None


def ledger_of_traits(rehearsals: Rehearsals, wanted: Iterable[Technique]) -> Ledger:
    """The plain step's ledger without a real step: enough to tell how close the wanted techniques stay to plain
    training."""
    plain = rehearsals.log(())
    traits = Traits(rehearsals.traits(plain))
    if uniting(wanted) or any(one.splits_batch for one in wanted):
        tried = (
            {}
            if rehearsals.worker is None
            else rehearsals.ask_worker(
                PiecesTask(**rehearsals.about_job()), rehearsals.hardware.environment, PIECES
            ).found
        )
        traits.note_pieces(rehearsals, plain, tried)
    found = plain_ledger(rehearsals.job, plain, None, rehearsals.hardware, None, traits.found)
    return replace(found, findings=replace(found.findings, reasons=traits.reasons))
