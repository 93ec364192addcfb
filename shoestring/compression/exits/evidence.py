"""Evidence for thresholds: the outputs of every exit on held-out rows, and the time of the model's parts on this
machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.exits.cascade import CascadeModel
from shoestring.compression.exits.confidence import check_logits
from shoestring.compression.exits.early_exit import EarlyExitModel
from shoestring.compression.exits.leaves_early import LeavesEarly
from shoestring.compression.exits.rows import logits_of
from shoestring.compression.exits.thresholds import ExitEvidence
from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import default_forward

UNREACHED = 2.0  # a threshold above every confidence, for an exit that is on


class PartSeconds(NamedTuple):
    """Seconds per row, in the form that `ExitEvidence` needs."""

    parts: tuple[float, ...]
    heads: tuple[float, ...]
    fixed: tuple[float, ...] = ()
    leaving: float = 0.0
    batch: int = 1


class Everything(nn.Module):
    """A module that is called like the model, returns its output, and keeps the logits of all exits before the end."""

    def __init__(self, inner: LeavesEarly) -> None:
        super().__init__()
        self.inner = inner
        self.small: tuple[Tensor, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.small, output = self.inner.all_exits(*args, **kwargs)
        return output


@torch.no_grad()
def gather_evidence(
    model: LeavesEarly,
    batches: Iterable[Batch],
    costs: PartSeconds,
    labels: Callable[[Batch], Tensor] | None = None,
    forward: Callable[[nn.Module, Batch], Any] = default_forward,
) -> ExitEvidence:
    """The outputs of every exit for these batches. A row counts as right if it has its label or, without labels, the
    class that the whole model gives."""
    confidences, rights = [], []
    for batch in batches:
        logits = logits_of_exits(model, batch, forward)
        truth = labels(batch) if labels is not None else logits[-1].argmax(1)
        if truth.shape != logits[-1].shape[:1]:
            raise Mistake(f"labels of shape {tuple(truth.shape)} for {len(logits[-1])} rows: give one class a row")
        confidences.append(torch.stack([model.sureness(one) for one in logits[:-1]], 1))
        rights.append(torch.stack([one.argmax(1) == truth for one in logits], 1))
    if not rights:
        raise Mistake("no batch to calibrate with: give some hundred held-out rows that training never saw")
    return ExitEvidence(torch.cat(confidences), torch.cat(rights), *costs)


@torch.no_grad()
def closeness(
    model: LeavesEarly, batches: Iterable[Batch], forward: Callable[[nn.Module, Batch], Any] = default_forward
) -> Tensor:
    """How like the whole model's answer that of every exit is, and that of the end: (rows, exits + 1)."""
    every = [logits_of_exits(model, batch, forward) for batch in batches]
    return torch.cat([torch.stack([likeness(one, logits[-1]) for one in logits], 1) for logits in every])


def logits_of_exits(model: LeavesEarly, batch: Batch, forward: Callable[[nn.Module, Batch], Any]) -> tuple[Tensor, ...]:
    """The logits of every exit and of the end, for all rows of a batch."""
    every = Everything(model).eval()
    output = forward(every, batch)
    return (*every.small, check_logits(logits_of(output), "the model"))


def likeness(logits: Tensor, wanted: Tensor) -> Tensor:
    """exp(-KL(wanted || logits)) of every row, from 0 to 1.

    >>> likeness(torch.tensor([[0.0, 0.0]]), torch.tensor([[5.0, 5.0]])).tolist()
    [1.0]
    """
    found, target = (torch.log_softmax(one.double(), 1) for one in (logits, wanted))
    return torch.exp(-(target.exp() * (target - found)).sum(1)).clamp(max=1.0)


@torch.no_grad()
def seconds_by_part(
    model: LeavesEarly,
    batch: Batch,
    rounds: int = 20,
    forward: Callable[[nn.Module, Batch], Any] = default_forward,
    clock: Callable[[], float] | None = None,
) -> PartSeconds:
    """Median seconds per row of this batch: between exits; of each head, including the search for confident rows; and
    the fixed time of every part, fitted from timings with all, half and a quarter of the rows: seconds(rows) = fixed +
    slope rows.

    Every round times everything, and only times of the same round are compared, because the machine's speed may change
    between rounds.

    clock returns the time; a clock that counts work instead of seconds gives costs in that unit.
    """
    rows = samples(batch)
    sizes = sorted({max(1, rows // 4), max(1, rows // 2), rows})
    smaller = {size: split(batch, rows // size)[0] if size < rows else batch for size in sizes}
    timing = ExitTimer(model, forward, clock or perf_counter)
    timing.warm(smaller.values())
    taken: list[dict[int, list[float]]] = []
    beyond = []  # seconds of an answer besides its parts and heads
    for _ in range(rounds):
        taken.append({size: timing.seconds(some) for size, some in smaller.items()})
        beyond.append(timing.to_the_end(batch) - sum(taken[-1][rows]))
    lines = [
        line([(size, statistics.median(one[size][place] for one in taken)) for size in sizes])
        for place in range(len(taken[0][rows]))
    ]
    exits = len(lines) // 2
    parts, heads = lines[: exits + 1], lines[exits + 1 :]
    extra = max(0.0, statistics.median(beyond))
    return PartSeconds(
        tuple(max(slope, 1e-12) for _, slope in parts),
        tuple(slope for _, slope in heads),
        tuple(fixed / rows for fixed, _ in parts),
        (sum(fixed for fixed, _ in heads) + extra) / rows,
        rows,
    )


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line to (rows, seconds): the fixed time and the time per row, neither below 0.

    >>> [round(one, 9) for one in line([(8, 5.0), (16, 7.0), (32, 11.0)])]
    [3.0, 0.25]
    """
    if len(points) < 2:
        return 0.0, points[0][1] / points[0][0]
    last, seconds = points[-1]
    slope = min(max(statistics.linear_regression(*zip(*points, strict=True)).slope, 0.0), seconds / last)
    return seconds - slope * last, slope


@dataclass(frozen=True)
class ExitTimer:
    """Times the parts of a model with exits."""

    model: LeavesEarly
    forward: Callable[[nn.Module, Batch], Any]
    clock: Callable[[], float]

    def warm(self, batches: Iterable[Batch]) -> None:
        """Warm-up calls, which are not timed."""
        for batch in batches:
            self.seconds(batch)
            self.to_the_end(batch)

    def to_the_end(self, batch: Batch) -> float:
        """Seconds of a batch from which no row leaves, although all exits are computed."""
        before = self.model.thresholds.clone()
        self.model.thresholds.fill_(UNREACHED)
        try:
            return self.seconds_of(partial(self.forward, self.model, batch))
        finally:
            self.model.thresholds.copy_(before)

    def seconds(self, batch: Batch) -> list[float]:
        """Seconds of a batch: between exits, to the end, and then of each head with the search for confident rows.

        Parts and heads of a forward are timed in the same call, by hooks at their borders: the difference of two calls
        would be noise for short parts.
        """
        every, marks = Everything(self.model).eval(), Marks(self.clock)
        handles = marks.on_parts(self.model)
        try:
            marks.restart()
            self.forward(every, batch)
            marks.end("end")
        finally:
            for handle in handles:
                handle.remove()
        choosing = [self.seconds_of(partial(leaving, self.model, logits)) for logits in every.small]
        parts = [marks.seconds[f"part {number}"] for number in range(len(every.small))]
        if isinstance(self.model, CascadeModel):
            return [*parts, marks.seconds["end"], *choosing]
        heads = [marks.seconds[f"head {number}"] for number in range(len(every.small))]
        return [*parts, marks.seconds["rest"], *(head + chosen for head, chosen in zip(heads, choosing, strict=True))]

    def seconds_of(self, work: Callable[[], object]) -> float:
        begin = self.clock()
        work()
        return self.clock() - begin


def leaving(model: LeavesEarly, logits: Tensor) -> Tensor:
    return (~(model.sureness(logits).double() >= UNREACHED)).nonzero()[:, 0]


class Marks:
    """Seconds of the parts of a forward, each from the end of the previous one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.restart()

    def restart(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = self.clock()

    def end(self, part: str) -> None:
        now = self.clock()
        if part not in self.seconds:
            self.seconds[part], self.last = now - self.last, now

    def hook(self, part: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.end(part)

        return note

    def on_parts(self, model: LeavesEarly) -> list[Any]:
        if isinstance(model, CascadeModel):
            return self.on_models(model)
        assert isinstance(model, EarlyExitModel), "there are these two"
        return self.on_blocks(model)

    def on_blocks(self, model: EarlyExitModel) -> list[Any]:
        """Heads are called one by one after the model's own forward, whose last part ends where the first head begins.
        Exits may share a head: its calls are told apart by their order."""
        blocks, heads = model.chain(), list(dict.fromkeys(model.heads.values()))

        def end_of_head(*_: Any) -> None:
            self.end(f"head {sum(part.startswith('head') for part in self.seconds)}")

        return [
            *(
                blocks[number - 1].register_forward_hook(self.hook(f"part {place}"))
                for place, number in enumerate(model.after)
            ),
            heads[0].register_forward_pre_hook(self.hook("rest")),
            *(head.register_forward_hook(end_of_head) for head in heads),
        ]

    def on_models(self, model: CascadeModel) -> list[Any]:
        return [
            one.register_forward_hook(self.hook(f"part {place}")) for place, one in enumerate(list(model.models)[:-1])
        ]
