"""A model flattened into one row of numbers. Devices receive, train and send rows; the rows of many devices are a
matrix.

A row has the trained weights first, then the statistics: floating-point buffers of the state_dict (a batch norm's
running mean and variance) and the counters of norm layers. Techniques see only the weights; federated/model/statistics.py
handles the rest. Frozen weights, other integer buffers and non-persistent buffers are the same on every device and are
not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.private import RUNNING_NORMS


class StatisticKind(Enum):
    """What averaging must know about a statistic."""

    VALUE = "any number"
    VARIANCE = "never negative"
    COUNTER = "a whole number"


@dataclass(frozen=True)
class LayoutEntry:
    name: str
    shape: tuple[int, ...]
    start: int  # position in the row
    trained: bool  # False: a statistic
    kind: StatisticKind = StatisticKind.VALUE

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    entries: tuple[LayoutEntry, ...]

    @cached_property
    def size(self) -> int:
        """Length of a row."""
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def trained_count(self) -> int:
        """How many numbers of a row are trained weights; they come first."""
        return max((entry.stop for entry in self.entries if entry.trained), default=0)

    @cached_property
    def weights(self) -> Layout:
        """The layout of the trained weights alone, as techniques see a model."""
        return Layout(tuple(entry for entry in self.entries if entry.trained))

    @cached_property
    def statistics(self) -> Layout:
        """The layout of the statistics alone, as a row that begins at 0."""
        return Layout(
            tuple(replace(entry, start=entry.start - self.trained_count) for entry in self.entries if not entry.trained)
        )

    def marks(self, kind: StatisticKind) -> Tensor:
        """A mask of the numbers of this kind."""
        found = torch.zeros(self.size, dtype=torch.bool)
        for entry in self.entries:
            if entry.kind is kind:
                found[entry.start : entry.stop] = True
        return found

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of a row by name, as views of the same memory; for a matrix of rows, stacked tensors."""
        lead = rows.shape[:-1]
        return {entry.name: rows[..., entry.start : entry.stop].view((*lead, *entry.shape)) for entry in self.entries}

    def row(self, model: nn.Module) -> Tensor:
        """Copy a model's numbers into a new row."""
        found = named_tensors(model)
        return torch.cat([found[entry.name].detach().flatten().float() for entry in self.entries])

    def load(self, model: nn.Module, row: Tensor) -> None:
        """Copy a row into a model."""
        found = named_tensors(model)
        with torch.no_grad():
            for name, value in self.views(row).items():
                found[name].copy_(value)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layout_of(model: nn.Module) -> Layout:
    """The layout of a model. Refuses models whose trained weights are not float32."""
    state = model.state_dict()
    found = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not found:
        raise Mistake("the model has no weight that needs a gradient: there is nothing that devices could train")
    odd = next(((name, one) for name, one in found if one.dtype != torch.float32), None)
    if odd is not None:
        raise Mistake(
            f"the weight {odd[0]} is of {odd[1].dtype}: devices train in torch.float32; make the model with .float()"
        )
    kinds = statistic_kinds(model)
    beside = [
        (name, one)
        for name, one in model.named_buffers()
        if name in state and (one.dtype == torch.float32 or name in kinds)
    ]
    entries, start = [], 0
    for place, (name, one) in enumerate((*found, *beside)):
        entries.append(
            LayoutEntry(name, tuple(one.shape), start, place < len(found), kinds.get(name, StatisticKind.VALUE))
        )
        start = entries[-1].stop
    return Layout(tuple(entries))


def statistic_kinds(model: nn.Module) -> dict[str, StatisticKind]:
    """Names of the norm layers' variances and counters. The meaning of other buffers is unknown."""
    found: dict[str, StatisticKind] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_running_norm(module):
            lead = f"{name}." if name else ""
            found |= {f"{lead}running_var": StatisticKind.VARIANCE, f"{lead}num_batches_tracked": StatisticKind.COUNTER}
    return found


def is_running_norm(module: nn.Module) -> bool:
    """Whether a module keeps running statistics: torch's batch norms and instance norms, and classes derived from them."""
    return isinstance(module, RUNNING_NORMS) and module.track_running_stats
