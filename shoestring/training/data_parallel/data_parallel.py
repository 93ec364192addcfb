"""DataParallel: every worker trains on its own samples of each batch; gradients are summed (all-reduce) while backward
runs.

    sent       2 (w - 1) / w  g            g: bytes of all gradients, w: workers; and a few bytes a weight
    memory     + one bucket                gradients live in the buckets that are sent

The loss is a mean over the batch's weight W, so worker r counts W_r / W, whatever its share of the samples. Equal to
one process with the whole batch, up to the order of the sum, as long as no layer mixes samples (batch norm does) and
none draws random numbers (dropout then draws other masks of the same distribution). Statistics that layers keep are
averaged. For a batch that grows with the number of workers, `linear` multiplies the rate by it, and `warmup` reaches
that rate gradually from the job's own.
Goyal et al.: Accurate, Large Minibatch SGD, 2017, arXiv 1706.02677.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Traffic, Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.private import RUNNING_NORMS, write_count
from shoestring.core.running.run import Run, add_up_shared, weighted_loss
from shoestring.core.running.run_state import RunState
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.learning_rate import rate_times
from shoestring.training.data_parallel.reducer import BUCKET, Bucket, Reducer, Send, make_buckets
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.technique import MIXED


@dataclass(frozen=True)
class DataParallel(GroupTechnique):
    """Give every worker its own part of each batch and add up the gradients (DDP).

    Costs: about twice the bytes of all gradients sent by every worker in a step; every worker holds the whole
    model.

    Not for: models that do not fit one worker (`Shard`, `Pipeline`), and batches with fewer samples than workers.
    """

    linear: bool = False  # multiply the optimizer's rate by the number of workers
    warmup: int = 0  # steps from the job's own rate to the multiplied one

    order: ClassVar[int] = 60
    exact: ClassVar[bool] = True
    unites: ClassVar[str] = "data"
    why: ClassVar[str] = "every worker trains on a part of each batch; gradients are summed"

    def __post_init__(self) -> None:
        if self.warmup < 0 or (self.warmup and not self.linear):
            raise Mistake(
                f"DataParallel(linear={self.linear}, warmup={self.warmup}): a warm-up leads, in at least one step, to the rate "
                f"that linear=True asks for"
            )

    def refusal(self, ledger: Ledger) -> str:
        return data_parallel_refusal(ledger)

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.CHANGED if self.linear else split_exactness(ledger)

    def drift(self, ledger: Ledger) -> float:
        """A rate multiplied by the number of workers moves the weights so many times as far."""
        return (ledger.workers.world - 1 if self.linear else 0.0) + mixed_drift(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        held, world = ledger.all_gradients, ledger.workers.world
        return with_traffic(with_buckets(ledger), 2 * (world - 1) / world * held, held / BUCKET + 3)

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        averaged = sum_gradients(run, link, lambda bucket: link.sum(bucket.buffer))
        return scale_rate(averaged, link.world, self.warmup) if self.linear else averaged


def data_parallel_refusal(ledger: Ledger) -> str:
    """Why data parallelism is impossible here; empty if it is possible."""
    workers = ledger.workers
    if workers.world < 2:
        return (
            "there is one worker: --devices gives more"
            if workers.per_copy == 1
            else "all workers hold parts of one copy of the model"
        )
    if 0 < workers.samples < workers.world:
        if ledger.has(Trait.UNSPLITTABLE):
            return ledger.findings.reasons.get(Trait.UNSPLITTABLE, "the batch can't be split into samples")
        return (
            f"batches of {workers.samples} samples for {workers.world} workers: some would have none; give a batch of {workers.world} "
            f"samples or more, or fewer --devices"
        )
    return gradient_sum_refusal(ledger)


def gradient_sum_refusal(ledger: Ledger) -> str:
    """Why gradients can't be sent and summed; empty if they can."""
    if ledger.has(Trait.SPARSE_GRADIENTS):
        return (
            "the model has sparse gradients, which can't be added up in buckets: make its embeddings with sparse=False"
        )
    return "the model has complex weights, and workers send real numbers" if ledger.has(Trait.COMPLEX_WEIGHTS) else ""


def split_exactness(ledger: Ledger) -> Exactness:
    """How close training stays to plain training when every worker has a part of each batch."""
    if ledger.has(Trait.MIXES_SAMPLES):
        return Exactness.CHANGED
    return Exactness.DISTRIBUTION if ledger.has(Trait.DRAWS) else Exactness.ROUNDING


def mixed_drift(ledger: Ledger) -> float:
    """The drift that splitting a batch adds where layers mix its samples."""
    return MIXED if ledger.has(Trait.MIXES_SAMPLES) else 0.0


def with_traffic(ledger: Ledger, sent: float, messages: float) -> Ledger:
    """The ledger of a step that sends `sent` bytes in `messages` messages."""
    hidden = ledger.pieces * ledger.columns.total("backward") if ledger.workers.hides else 0.0
    waiting = max(ledger.workers.seconds(sent, messages) - hidden, 0.0)
    return replace(ledger, traffic=ledger.traffic + Traffic(sent=sent, waiting=waiting))


def with_buckets(ledger: Ledger) -> Ledger:
    """The ledger with gradients in buckets: a whole bucket is allocated when its first gradient comes."""
    blocks = ledger.columns
    return replace(
        ledger,
        blocks=blocks.with_changes(spike=blocks.column("spike") + np.clip(blocks.column("gradient"), 0.0, BUCKET)),
    )


def trained_parameters(run: Run) -> list[nn.Parameter]:
    return [
        parameter for group in run.optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]


def sum_gradients(run: Run, link: Link, send: Send, multiple: int = 1, alike: Send | None = None) -> Run:
    """The run whose gradients are summed over a link's workers. `send` starts to sum a bucket, whose size is a multiple
    of `multiple`.

    Where the result depends on what else is in the bucket (compression), weights that several workers of a replica hold
    (along stage or tensor) would drift apart: buckets of these weights alone are sent with `alike`."""
    weights = trained_parameters(run)
    held = {one for one in weights if alike is not None and (one in run.held.shared or run.held.share(one) < 1)}
    buckets = [
        Bucket(members, multiple, str(number))
        for number, members in enumerate(make_buckets(one for one in weights if one not in held))
    ]
    together = [
        Bucket(members, 1, f"alike {number}")
        for number, members in enumerate(make_buckets(one for one in weights if one in held))
    ]
    reducer = Reducer(
        [*buckets, *together], link, lambda bucket: alike(bucket) if alike and bucket in together else send(bucket)
    )
    statistics = Statistics(run.model, link)

    def backward(now: Run, value: Tensor) -> None:
        if not now.last:
            run.backward(now, value)
            return
        with reducer.listening():
            run.backward(now, value)

    def gradients(now: Run, batch: Batch) -> Tensor:
        share = share_of(now, link, batch)
        statistics.begin()
        loss = run.gradients(
            replace(now, loss=lambda output, part: weighted_loss(now.loss(output, part), share())), batch
        )
        total, unused = reducer.tally(loss)
        for parameter in unused:
            parameter.grad = None
        if now.last:  # another stage may have used weights that no replica of this stage used
            add_up_shared(run.held.shared)
        statistics.average()
        return total

    return replace(run, gradients=gradients, backward=backward, held=replace(run.held, shared={}))


def share_of(run: Run, link: Link, batch: Batch) -> Callable[[], float]:
    """A function for this worker's share of the batch's weight; call it late, since the others' weights are being
    received meanwhile."""
    own = 0.0 if run.team.assignment.idle else float(run.cuts.weight(batch))
    whole = torch.tensor([own], dtype=torch.float64)
    sending = link.sum(whole)
    found: list[float] = []

    def share() -> float:
        if not found:
            sending.wait()
            if not whole.item() > 0:
                raise Mistake(f"the batch has the weight {whole.item()}: a mean over nothing; check the job's weight")
            found.append(own / whole.item())
        return found[0]

    return share


class Statistics:
    """Buffers that layers update (batch norm's statistics): averaged after every step in which they changed.

    Integers (batch norm's count) have no mean; with `counts` they are included, and sent as they are.
    """

    def __init__(self, model: nn.Module, link: Link, counts: bool = False) -> None:
        self.link, self.dtype = link, torch.float64 if counts else torch.float32
        self.buffers = [buffer for buffer in model.buffers() if counts or buffer.is_floating_point()]
        self.silent = {
            buffer
            for part in model.modules()
            if isinstance(part, RUNNING_NORMS)
            for buffer in part.buffers(recurse=False)
        }  # norm layers: their kernels change buffers without raising the version counter

    def begin(self) -> None:
        self.versions = [write_count(buffer) for buffer in self.buffers]

    def norms(self) -> list[bool]:
        """For each buffer, whether it belongs to a norm layer, which changes it in every step."""
        return [buffer in self.silent for buffer in self.buffers]

    def changed_buffers(self) -> list[bool]:
        """For each buffer, whether it changed since the step began."""
        return [
            norm or write_count(buffer) != version
            for norm, buffer, version in zip(self.norms(), self.buffers, self.versions, strict=True)
        ]

    def flat(self, which: Iterable[bool]) -> Tensor:
        """The chosen buffers as one flat tensor."""
        with torch.no_grad():
            return torch.cat([buffer.reshape(-1).to(self.dtype) for buffer in compress(self.buffers, which)])

    def put(self, buffers: Sequence[Tensor], flat: Tensor) -> None:
        """Set buffers from such a flat tensor."""
        with torch.no_grad():
            for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(value.view(buffer.shape))

    def average(self) -> None:
        changed = self.changed_buffers()
        if any(changed):
            flat = self.flat(changed)
            self.link.sum(flat).wait()
            self.put(list(compress(self.buffers, changed)), flat.div_(self.link.world))


class WarmupSteps(RunState):
    """The number of steps taken."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def scale_rate(run: Run, world: int, warmup: int) -> Run:
    """The run with its rate multiplied by the number of workers, reached gradually during warm-up."""
    pace = WarmupSteps()

    def update(now: Run) -> None:
        pace.step += 1
        factor = 1 + (world - 1) * min(pace.step / warmup, 1.0) if warmup else float(world)
        with rate_times(now.optimizer, factor):
            run.update(now)

    return replace(run, update=update, state={**run.state, "pace": pace})
