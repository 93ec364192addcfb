"""Evidence for thresholds: what every exit would say of held-out rows, and what the parts of a model cost on this machine."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.exits.cascade import Cascade
from shoestring.compression.exits.confidence import check_logits
from shoestring.compression.exits.early_exit import EarlyExit
from shoestring.compression.exits.rows import hidden_of, logits_of
from shoestring.compression.exits.thresholds import Evidence
from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import default_forward

UNREACHED = 2.0   # a threshold that no confidence reaches, of an exit that is used


class Parts(NamedTuple):
    """Seconds of a row, as `Evidence` has them."""

    parts: tuple[float, ...]
    heads: tuple[float, ...]
    fixed: tuple[float, ...] = ()
    leaving: float = 0.0
    batch: int = 1


class Everything(nn.Module):
    """Calls as the model's, all exits as its output."""

    def __init__(self, inner: EarlyExit | Cascade) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.all_exits(*args, **kwargs)


@torch.no_grad()
def gathered(model: EarlyExit | Cascade, batches: Iterable[Batch], costs: Parts, labels: Callable[[Batch], Tensor] | None = None,
             forward: Callable[[nn.Module, Batch], Any] = default_forward) -> Evidence:
    """What every exit says of these batches; right is the label, or without labels, the class that the whole model gives."""
    every = Everything(model).eval()
    confidences, rights = [], []
    for batch in batches:
        small, output = forward(every, batch)
        logits = (*small, check_logits(logits_of(output), "the model"))
        truth = labels(batch) if labels is not None else logits[-1].argmax(1)
        if truth.shape != logits[-1].shape[:1]:
            raise Mistake(f"labels of shape {tuple(truth.shape)} for {len(logits[-1])} rows: give one class a row")
        confidences.append(torch.stack([model.sureness(one) for one in small], 1))
        rights.append(torch.stack([one.argmax(1) == truth for one in logits], 1))
    if not rights:
        raise Mistake("no batch to calibrate with: give some hundred held-out rows that training never saw")
    return Evidence(torch.cat(confidences), torch.cat(rights), *costs)


@torch.no_grad()
def seconds_by_part(model: EarlyExit | Cascade, batch: Batch, rounds: int = 20,
                    forward: Callable[[nn.Module, Batch], Any] = default_forward) -> Parts:
    """Median seconds for a row of this batch: between exits; of each head, with finding the sure rows; and what does not become less with
    the rows, from the same on half of them and a quarter:  seconds(rows) = fixed + slope rows  for every part.
    """
    rows = samples(batch)
    sizes = sorted({max(1, rows // 4), max(1, rows // 2), rows})
    found = {size: timed_parts(model, split(batch, rows // size)[0] if size < rows else batch, rounds, forward) for size in sizes}
    lines = [line([(size, found[size][kind][place]) for size in sizes])
             for kind in (0, 1) for place in range(len(found[rows][kind]))]
    exits = len(found[rows][1])
    parts, heads = lines[:exits + 1], lines[exits + 1:]
    whole = sum(found[rows][0]) + sum(found[rows][1])
    extra = max(0.0, seconds_to_the_end(model, batch, rounds, forward) - whole)
    return Parts(tuple(max(slope, 1e-12) for _, slope in parts), tuple(slope for _, slope in heads),
                 tuple(fixed / rows for fixed, _ in parts), (sum(fixed for fixed, _ in heads) + extra) / rows, rows)


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Of seconds by rows, what is fixed and what each row adds, neither below 0.

    >>> [round(one, 9) for one in line([(8, 5.0), (16, 7.0), (32, 11.0)])]
    [3.0, 0.25]
    """
    if len(points) < 2:
        return 0.0, points[0][1] / points[0][0]
    last, seconds = points[-1]
    slope = min(max(statistics.linear_regression(*zip(*points, strict=True)).slope, 0.0), seconds / last)
    return seconds - slope * last, slope


def seconds_to_the_end(model: EarlyExit | Cascade, batch: Batch, rounds: int, forward: Callable[[nn.Module, Batch], Any]) -> float:
    """Of a batch of which no row leaves, though all exits look."""
    before = model.thresholds.clone()
    model.thresholds.fill_(UNREACHED)
    try:
        forward(model, batch)
        return median_of(rounds, partial(forward, model, batch))
    finally:
        model.thresholds.copy_(before)


def timed_parts(model: EarlyExit | Cascade, batch: Batch, rounds: int,
                forward: Callable[[nn.Module, Batch], Any]) -> tuple[list[float], list[float]]:
    """Median seconds of a batch between exits, and of each head with finding the sure rows."""
    every = Everything(model).eval()
    clock = Clock()
    handles = clock.on_models(model) if isinstance(model, Cascade) else clock.on_blocks(model)
    forward(every, batch)
    taken = []
    try:
        for _ in range(rounds):
            clock.marks.clear()
            begin = perf_counter()
            small, _ = forward(every, batch)
            clock.marks.append(perf_counter())
            taken.append([after - before for before, after in zip([begin, *clock.marks], clock.marks, strict=False)])
    finally:
        for handle in handles:
            handle.remove()
    medians = [statistics.median(one[place] for one in taken) for place in range(len(small) + 1)]
    choosing = [median_of(rounds, partial(leaving, model, logits)) for logits in small]
    if isinstance(model, Cascade):
        return medians, choosing
    # a block's hidden state, then what follows; heads come after the model's own forward, one by one
    heads = [median_of(rounds, partial(head, hidden)) for head, hidden in zip(model.heads.values(), clock.hidden, strict=True)]
    medians[-1] = max(medians[-1] - sum(heads), 0.0)
    return medians, [head + chosen for head, chosen in zip(heads, choosing, strict=True)]


def leaving(model: EarlyExit | Cascade, logits: Tensor) -> Tensor:
    return (~(model.sureness(logits).double() >= UNREACHED)).nonzero()[:, 0]


def median_of(rounds: int, work: Callable[[], object]) -> float:
    """Seconds."""
    taken = []
    for _ in range(rounds):
        begin = perf_counter()
        work()
        taken.append(perf_counter() - begin)
    return statistics.median(taken)


class Clock:
    """When the parts of a forward were over."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.hidden: list[Tensor] = []

    def on_blocks(self, model: EarlyExit) -> list[Any]:
        blocks = model.chain()
        self.hidden = [torch.empty(0)] * len(model.after)

        def noting(place: int) -> Callable[..., None]:
            def note(module: nn.Module, given: Any, output: Any) -> None:
                self.marks.append(perf_counter())
                self.hidden[place] = hidden_of(output)
            return note

        return [blocks[number - 1].register_forward_hook(noting(place)) for place, number in enumerate(model.after)]

    def on_models(self, model: Cascade) -> list[Any]:
        return [one.register_forward_hook(lambda module, given, output: self.marks.append(perf_counter())) for one in model.models]
