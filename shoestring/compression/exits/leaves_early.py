"""What models have in common whose samples leave early: thresholds, and the depth at which each sample of the last call
left.

    model(x)          the output, as from the model without exits
    model.depths      (rows,) of that call: 0 for the first exit; the number of thresholds: the row went to the end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.calibration.latency import Latency, latencies, mixed_latency, time_interleaved
from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake


class ExitOutput(NamedTuple):
    """An output, and the exit of every row."""

    output: Any  # of the model's own type, with logits only
    exits: Tensor  # (rows,): number of the exit, from 0; the number of exits: the end of the model
    confidence: Tensor  # (rows,): confidence at that exit; NaN for rows that went to the end


class LeavesEarly(nn.Module, ABC):
    """Abstract: `answer` gives the output and the exit of every row, `all_exits` the logits of all exits for all rows."""

    thresholds: Tensor
    sureness: Callable[[Tensor], Tensor]
    depths: Tensor | None = None  # of the rows of the last call; None: there was none, or all rows went to the end

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.answer(*args, **kwargs)
        self.depths = found.exits
        return found.output

    @abstractmethod
    def answer(self, *args: Any, **kwargs: Any) -> ExitOutput:
        """The output, and where every row left."""

    @abstractmethod
    def all_exits(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Logits of every exit for all rows, and the output of the end."""


def latencies_beside(
    model: nn.Module,
    original: nn.Module,
    forward: Callable[[nn.Module, Batch], Any],
    batches: Sequence[Batch],
    sample: Batch,
) -> tuple[Latency, Latency]:
    """Latencies of a model, whose samples may take different times, and of the original, called alternately because the
    machine's speed changes over time."""
    if not isinstance(model, LeavesEarly):
        mine, plain = latencies([model, original], forward, sample)
        return mine, plain
    answers = typical_answers(model, batches, forward)
    calls = [partial(forward, model, one) for _, one in answers]
    with torch.no_grad():
        *kinds, plain = time_interleaved([*calls, partial(forward, original, sample)])
    return mixed_latency([(share, one) for (share, _), one in zip(answers, kinds, strict=True)]), plain


@torch.no_grad()
def typical_answers(
    model: LeavesEarly, batches: Sequence[Batch], forward: Callable[[nn.Module, Batch], Any]
) -> list[tuple[float, Batch]]:
    """A single sample for every exit that some sample takes, with the share of samples that do."""
    found: dict[int, Batch] = {}
    counts: dict[int, int] = {}
    for batch in batches:
        forward(model, batch)
        depths = model.depths.tolist() if model.depths is not None else [len(model.thresholds)]
        for row, depth in enumerate(depths):
            counts[depth] = counts.get(depth, 0) + 1
            if depth not in found:
                found[depth] = sample_at(batch, row)
    whole = sum(counts.values())
    return [(counts[depth] / whole, found[depth]) for depth in sorted(found)]


def sample_at(batch: Batch, row: int) -> Batch:
    """One sample of a batch; the whole batch if it can't be split."""
    try:
        return split(batch, samples(batch))[row]
    except (Mistake, IndexError):
        return batch
