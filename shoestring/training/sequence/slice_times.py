"""Measure how long slices of a job's own sequences take, to find the best lengths for `SequencePipeline` in a pipeline
of its model."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from shoestring.core.batch import Batch
from shoestring.core.running.run import Run
from shoestring.training.sequence.sequence_pipeline import (
    SequencePipeline,
    SliceSupport,
    length_of,
    rows,
    slice_support,
    slices_of,
)
from shoestring.training.sequence.sliced_attention import SliceSpan
from shoestring.training.sequence.slices import best_slices, fit_times

ROUNDS = 3  # the shortest of so many measurements counts


def best_tokens(run: Run, batch: Batch, stages: int, granularity: int = 32) -> SequencePipeline:
    """The slices of this batch's sequences that should take least through so many equal stages, as measured in this
    process.

    A stage takes the same fraction of every slice's time, so times of the whole model will do. `run` is a plain run.
    """
    length = length_of(batch)
    best = best_slices(fit_times(measure_slices(run, batch, usual_pairs(length))), length, stages, granularity)
    return SequencePipeline(len(best.lengths), ",".join(map(str, best.lengths)))


def usual_pairs(length: int) -> list[tuple[int, int]]:
    """(length, context) pairs that a fit needs: six lengths without context, and nine with one."""
    alone = [max(length * part // 32, 1) for part in (1, 2, 4, 8, 16, 32)]
    return [
        *((one, 0) for one in dict.fromkeys(alone)),
        *((length * long // 16, length * before // 16) for long in (1, 2, 4) for before in (2, 6, 12)),
    ]


def measure_slices(run: Run, batch: Batch, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Seconds of a slice's forward, loss and backward, by (tokens, tokens before it). No gradient is left."""
    found, seconds = slice_support(run, batch), {}
    for length, context in pairs:
        seconds[length, context] = min(one_slice(run, found, batch, length, context) for _ in range(ROUNDS))
        run.model.zero_grad(set_to_none=True)
    return seconds


def one_slice(run: Run, found: SliceSupport, batch: Batch, length: int, context: int) -> float:
    part = rows(batch, SliceSpan(0, context + length))
    *before, last = slices_of(run, found, part, (context, length) if context else (length,))
    for one in before:
        with one.within(), torch.no_grad():
            run.forward(run.model, one.batch)
    begun = time.perf_counter()
    with last.within():
        value = run.loss(run.forward(run.model, last.batch), last.batch)
        run.backward(run, value)
    return time.perf_counter() - begun
