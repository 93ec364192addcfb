"""Which way trains a job's devices: the fastest that agrees with the plain loop, tried on a few real devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoestring.core.exactness import Exactness
from shoestring.core.job import Job, default_forward, default_loss
from shoestring.core.seams import calls_user
from shoestring.federated.layout import Layout
from shoestring.federated.records import Records
from shoestring.federated.simulation.cohort.agreement import Agreement, agreement, trial_of
from shoestring.federated.simulation.cohort.dense import dense_layers
from shoestring.federated.simulation.cohort.fused import FusedMethod
from shoestring.federated.simulation.cohort.grids import grid_outputs
from shoestring.federated.simulation.cohort.hooks import hooked_gradients, replaced_forward
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, made_model, sequential
from shoestring.federated.simulation.cohort.stacked import StackedMethod
from shoestring.federated.simulation.cohort.vmapped import vmapped, vmapped_losses
from shoestring.federated.simulation.cohort.way import CohortMethod, Unsuitable

ROWS = 24 << 20  # bytes of a chunk's rows, at most
FUSED, STACKED, SEQUENTIAL = "fused", "stacked", "sequential"
WORDS = {
    FUSED: "steps written by hand for stacked matrix products",
    STACKED: "one forward and backward of stacked weights",
    SEQUENTIAL: "one device after the other",
}


@dataclass(frozen=True)
class How:
    kind: str  # "fused", "stacked" or "sequential"
    chunk: int  # devices at once
    why: str  # for people: which way, and why not a faster one
    masks: bool = False  # stacked, cross entropy of classes: batches shorter than others are filled up with samples without a share
    draws: bool = False  # dropout draws other numbers than it does one device after the other
    alone: bool = (
        False  # what a device finds depends on who worked before it: in one process, at least the order is the same
    )

    @property
    def exactness(self) -> Exactness:
        """Against one device after the other."""
        if self.alone:
            return Exactness.DISTRIBUTION
        return (
            Exactness.BITS if self.kind == SEQUENTIAL else Exactness.DISTRIBUTION if self.draws else Exactness.ROUNDING
        )


@calls_user("model")
def how_to_work(job: Job, layout: Layout, sample: Sequence[Records]) -> How:
    """The fastest way that is right for these devices; each is tried against the plain loop."""
    plain = sequential(job, layout, made_model(job))
    reasons: list[str] = []
    trial = trial_of(plain, sample)
    for kind, masks in ((FUSED, False), (STACKED, True), (STACKED, False)):
        how = How(kind, chunk_of(kind, plain), WORDS[kind], masks)
        try:
            said = agreement(way_of(how, plain), trial)
        except Unsuitable as why:
            said = Agreement(str(why))
        if not said.reason:
            note = " (dropout draws other numbers than it would alone, of the same distribution)" if said.draws else ""
            return replace(how, why="; ".join([WORDS[kind] + note, *reasons]), draws=said.draws)
        if not masks:
            reasons.append(f"not {kind}: {said.reason}")
    return How(SEQUENTIAL, 1, "; ".join([WORDS[SEQUENTIAL], *reasons]), alone=trial.said.unseen)


def plainly(how: How, why: str) -> How:
    """The same devices together, each worked for by the plain loop."""
    return How(SEQUENTIAL, how.chunk, f"{WORDS[SEQUENTIAL]}; not {how.kind}: {why}")


def chunk_of(kind: str, plain: SequentialMethod) -> int:
    """Devices at once, a fixed function of the model: measured on an EPYC with 1 MiB of second and 32 MiB of third cache.

    More of them share the cost of calling an operation, which hand-written steps of small models need most; fewer stay in a cache with all
    that is theirs, which whole models need more, once what they call is recorded.
    """
    most = 8 if kind == STACKED else 32
    return max(min(most, ROWS // (4 * plain.layout.size)), 2)


def way_of(how: How, plain: SequentialMethod) -> CohortMethod:
    if how.kind == FUSED:
        return fused(plain)
    return stacked(plain, how.masks, how.draws) if how.kind == STACKED else plain


def fused(plain: SequentialMethod) -> FusedMethod:
    job = plain.job
    if job.forward is not default_forward or job.loss is not default_loss:
        raise Unsuitable("the job has a forward or a loss of its own")
    if reason := replaced_forward(plain.model):
        raise Unsuitable(reason)
    return FusedMethod(plain.layout, dense_layers(plain.model, plain.layout))


def stacked(plain: SequentialMethod, masks: bool, draws: bool) -> StackedMethod:
    if any(not entry.trained for entry in plain.layout.entries):
        raise Unsuitable(
            "the model keeps statistics (a batch norm's), which a stacked forward would not bring up to date"
        )
    if reason := hooked_gradients(plain.model):
        raise Unsuitable(reason)
    if masks and plain.job.loss is not default_loss:
        raise Unsuitable("the job's own loss may be no mean over samples")
    try:
        if reason := replaced_forward(plain.model):
            raise Unsuitable(reason)
        return StackedMethod(plain, grid_outputs(plain.job, plain.model), masks, draws=draws)
    except Unsuitable:
        losses = None if masks else vmapped_losses(plain.job, plain.model)
        return StackedMethod(plain, vmapped(plain.job, plain.model), masks, losses, draws)
