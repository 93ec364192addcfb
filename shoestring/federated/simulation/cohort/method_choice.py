"""Chooses the simulation method for a job: the fastest one that agrees with the plain loop on a few real devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoestring.core.exactness import Exactness
from shoestring.core.job import Job, default_forward, default_loss
from shoestring.core.user_code.seams import calls_user
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout
from shoestring.federated.simulation.cohort.agreement import Agreement, agreement, make_trial
from shoestring.federated.simulation.cohort.fused.dense import dense_layers
from shoestring.federated.simulation.cohort.fused.fused import FusedMethod
from shoestring.federated.simulation.cohort.hooks import bypass_obstacle, stacking_obstacle
from shoestring.federated.simulation.cohort.method import CohortMethod, Unsuitable
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, make_model, sequential_method
from shoestring.federated.simulation.cohort.stacked.convolutional import convolutional_outputs
from shoestring.federated.simulation.cohort.stacked.stacked import StackedMethod
from shoestring.federated.simulation.cohort.stacked.vmapped import vmapped_losses, vmapped_outputs

ROWS = 24 << 20  # bytes of a chunk's rows at most
DEVICES = 32  # of a chunk at most
FUSED, STACKED, SEQUENTIAL = "fused", "stacked", "sequential"
WORDS = {
    FUSED: "hand-written steps of stacked matrix products",
    STACKED: "one forward and backward of stacked weights",
    SEQUENTIAL: "one device after the other",
}


@dataclass(frozen=True)
class MethodChoice:
    """How devices are simulated."""

    kind: str  # "fused", "stacked" or "sequential"
    chunk: int  # devices at once
    why: str  # for people: what the method does, and why it is not a faster one
    masks: bool = False  # stacked with cross entropy: short batches are padded with samples of weight 0
    draws: bool = False  # dropout draws other numbers than the sequential method
    alone: bool = (
        False  # a device's result depends on the devices before it, so use a single process to keep their order
    )

    @property
    def exactness(self) -> Exactness:
        """How close the result is to that of the sequential method."""
        if self.alone:
            return Exactness.DISTRIBUTION
        return (
            Exactness.BITS if self.kind == SEQUENTIAL else Exactness.DISTRIBUTION if self.draws else Exactness.ROUNDING
        )


@calls_user("model")
def choose_method(job: Job, layout: Layout, sample: Sequence[Records]) -> MethodChoice:
    """Try the methods, fastest first, on these devices against the plain loop, and choose the first that agrees."""
    plain = sequential_method(job, layout, make_model(job))
    reasons: list[str] = []
    trial = make_trial(plain, sample)
    for kind, masks in ((FUSED, False), (STACKED, True), (STACKED, False)):
        how = MethodChoice(kind, chunk_size(kind, plain), WORDS[kind], masks)
        try:
            said = agreement(method_of(how, plain), trial)
        except Unsuitable as why:
            said = Agreement(str(why))
        if not said.reason:
            note = " (dropout draws other numbers than one by one, from the same distribution)" if said.draws else ""
            return replace(how, why="; ".join([WORDS[kind] + note, *reasons]), draws=said.draws)
        if not masks:
            reasons.append(f"not {kind}: {said.reason}")
    return MethodChoice(SEQUENTIAL, 1, "; ".join([WORDS[SEQUENTIAL], *reasons]), alone=trial.verdict.unseen)


def sequential_choice(how: MethodChoice, why: str) -> MethodChoice:
    """The plain loop in place of a method that turned out to be wrong. Chunks stay the same."""
    return MethodChoice(SEQUENTIAL, how.chunk, f"{WORDS[SEQUENTIAL]}; not {how.kind}: {why}")


def chunk_size(kind: str, plain: SequentialMethod) -> int:
    """Devices at once, as a function of the model. Measured on an EPYC with 1 MiB of L2 and 32 MiB of L3 cache.

    With more devices, the overhead of calling an operation is shared, which matters most for fused steps of small
    models. With fewer, their tensors fit into the cache, which matters more for stacked models, once they are recorded.
    """
    most = 8 if kind == STACKED else DEVICES
    return max(min(most, ROWS // (4 * plain.layout.size)), 2)


def method_of(how: MethodChoice, plain: SequentialMethod) -> CohortMethod:
    if how.kind == FUSED:
        return fused_method(plain)
    return stacked_method(plain, how.masks, how.draws) if how.kind == STACKED else plain


def fused_method(plain: SequentialMethod) -> FusedMethod:
    job = plain.job
    if job.forward is not default_forward or job.loss is not default_loss:
        raise Unsuitable("the job has its own forward or loss")
    if reason := bypass_obstacle(plain.model):
        raise Unsuitable(reason)
    return FusedMethod(plain.layout, dense_layers(plain.model, plain.layout))


def stacked_method(plain: SequentialMethod, masks: bool, draws: bool) -> StackedMethod:
    if any(not entry.trained for entry in plain.layout.entries):
        raise Unsuitable("the model keeps statistics (a batch norm's), which a stacked forward would not update")
    if reason := stacking_obstacle(plain.model):
        raise Unsuitable(reason)
    if masks and plain.job.loss is not default_loss:
        raise Unsuitable("the job's own loss may not be a mean over samples")
    try:
        if reason := bypass_obstacle(plain.model):
            raise Unsuitable(reason)
        return StackedMethod(plain, convolutional_outputs(plain.job, plain.model), masks, draws=draws)
    except Unsuitable:
        losses = None if masks else vmapped_losses(plain.job, plain.model)
        return StackedMethod(plain, vmapped_outputs(plain.job, plain.model), masks, losses, draws)
