"""A cascade: models from small to large; rows with low confidence go on to the next model, in ever smaller batches.

    answer(row) = model_k(row), k the first with confidence_k >= threshold_k, else the last

Viola, Jones: Rapid Object Detection using a Boosted Cascade of Simple Features, 2001, CVPR; Wang et al.: Wisdom of
Committees, 2022, arXiv 2012.01988 (cascades of networks by confidence). Models may differ in everything except their
classes and arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.exits.confidence import check_logits, measure_named
from shoestring.compression.exits.leaves_early import ExitOutput, LeavesEarly
from shoestring.compression.exits.rows import logits_of, row_count, select_rows, with_logits
from shoestring.compression.exits.thresholds import checked_thresholds
from shoestring.core.errors import Mistake


class CascadeModel(LeavesEarly):
    """Models from small to large, with a threshold for each but the last; inf: the model is left out.

    All arguments with a row per sample are cut to the rows that go on. The output has the last model's type, with
    logits only.
    """

    def __init__(
        self, models: Sequence[nn.Module], thresholds: Sequence[float] | None = None, measure: str = "probability"
    ) -> None:
        super().__init__()
        if len(models) < 2:
            raise Mistake(f"a cascade of {len(models)} models: give a small and a larger one at least")
        self.models = nn.ModuleList(models)
        self.measure, self.sureness = measure, measure_named(measure)
        chosen = checked_thresholds(
            thresholds if thresholds is not None else (math.inf,) * (len(models) - 1), len(models) - 1
        )
        self.register_buffer("thresholds", torch.tensor(chosen, dtype=torch.float64))
        self.kind: type | None = None  # type of the last model's output, once seen

    @torch.no_grad()
    def answer(self, *args: Any, **kwargs: Any) -> ExitOutput:
        """The output, and the number of the model that answered each row."""
        if any(module.training for module in self.modules()):
            raise Mistake("a cascade answers in evaluation only: train its models one by one; call .eval() first")
        count, last = row_count(args, kwargs), len(self.models) - 1
        given, rows = (args, kwargs), torch.arange(count, device=self.thresholds.device)
        exits = torch.full((count,), last, device=rows.device)
        confidence = torch.full((count,), math.nan, dtype=torch.float64, device=rows.device)
        whole: Tensor | None = None
        for number, limit in enumerate((*self.thresholds.tolist(), -math.inf)):
            if limit == math.inf or not len(rows):
                continue
            logits = self.logits(number, given)
            sure = self.sureness(logits).double()
            goes = sure >= limit if number < last else torch.ones_like(sure, dtype=torch.bool)
            whole = logits.new_empty(count, logits.shape[1]) if whole is None else whole
            if whole.shape[1] != logits.shape[1]:
                raise Mistake(
                    f"model {number} of the cascade has {logits.shape[1]} classes and one before it {whole.shape[1]}: "
                    f"all must have the same"
                )
            whole[rows[goes]] = logits[goes].to(whole.dtype)
            exits[rows[goes]] = number
            if number < last:
                confidence[rows[goes]] = sure[goes]
            on = (~goes).nonzero()[:, 0]
            given = select_rows(given, on, len(rows)) if 0 < len(on) < len(rows) else given
            rows = rows[on]
        if self.kind is None:  # no row has reached the last model yet: send one, to see the type of its output
            some, named = select_rows((args, kwargs), torch.arange(1), count)
            self.kind = type(self.models[last](*some, **named))
        return ExitOutput(with_logits(self.kind, whole if whole is not None else torch.empty(0)), exits, confidence)

    def logits(self, number: int, given: Any) -> Tensor:
        args, kwargs = given
        output = self.models[number](*args, **kwargs)
        if number == len(self.models) - 1:
            self.kind = type(output)
        return check_logits(logits_of(output), f"model {number} of the cascade")

    def all_exits(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Logits of every model but the last for all rows, and the last one's output."""
        small = tuple(self.logits(number, (args, kwargs)) for number in range(len(self.models) - 1))
        output = self.models[-1](*args, **kwargs)
        self.kind = type(output)
        return small, output
