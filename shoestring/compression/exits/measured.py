"""Measure exits on samples on which nothing was chosen, beside what was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from shoestring.compression.exits.early_exit import EarlyExitModel
from shoestring.compression.exits.evidence import PartSeconds, gather_evidence
from shoestring.compression.exits.leaves_early import LeavesEarly
from shoestring.compression.exits.thresholds import operate
from shoestring.core.batch import Batch

TIMED = 16  # most batches used to time both models


@dataclass(frozen=True)
class ExitsMeasurement:
    after: tuple[int, ...]  # number of blocks before each exit; empty: a cascade of models
    expected: Mapping[str, Any]  # shares of rows that leave at each exit and at the end, speed-up and loss
    shares: tuple[float, ...]
    loss: float  # share of samples with another class than at the end
    speedup: float  # of whole batches, compared with the original model

    def as_json(self) -> dict[str, Any]:
        def both(name: str, measured: Any) -> dict[str, Any]:
            return {"predicted": self.expected.get(name), "measured": measured}

        return {
            "after_blocks": list(self.after),
            "shares": both("shares", list(self.shares)),
            "loss": both("loss", self.loss),
            "speedup": both("speedup", self.speedup),
        }

    @property
    def text(self) -> str:
        expected = " / ".join(f"{one:.0%}" for one in self.expected.get("shares", ()))
        found = " / ".join(f"{one:.0%}" for one in self.shares)
        blocks = ", ".join(map(str, self.after))
        where = f"exits after blocks {blocks}" if blocks else "cascade of a small and the large model"
        return (
            f"{where}: {found} of the samples leave there and at the end (predicted "
            f"{expected}); whole batches {self.speedup:.2f} times as fast (predicted {self.expected.get('speedup', 1.0):.2f}), and "
            f"{self.loss:.2%} get another class than at the end (predicted {self.expected.get('loss', 0.0):.2%})"
        )


@torch.no_grad()
def exits_measured(
    model: nn.Module,
    original: nn.Module,
    edits: Sequence[Mapping[str, Any]],
    batches: Sequence[Batch],
    forward: Callable[[nn.Module, Batch], Any],
    clock: Callable[[], float] = perf_counter,
) -> ExitsMeasurement | None:
    """None: the model has no exits."""
    if not isinstance(model, LeavesEarly):
        return None
    alike = PartSeconds((1.0,) * (len(model.thresholds) + 1), (0.0,) * len(model.thresholds))
    point = operate(gather_evidence(model, batches, alike, forward=forward), model.thresholds.tolist())
    seconds = [0.0, 0.0]
    for batch in batches[:TIMED]:  # alternately, because the machine's speed changes over time
        for place, one in enumerate((model, original)):
            begin = clock()
            forward(one, batch)
            seconds[place] += clock() - begin
    expected: Mapping[str, Any] = next((edit["expected"] for edit in edits if "expected" in edit), {})
    after = model.after if isinstance(model, EarlyExitModel) else ()
    return ExitsMeasurement(after, expected, point.shares, point.loss, seconds[1] / max(seconds[0], 1e-12))
