"""A model as one row of numbers: what devices are given, train and send is such a row, and the rows of many devices are a matrix.

In it are the weights that are trained and, after them, the model's statistics: the floating-point buffers of its state (a batch norm's
running mean and variance) and the counters of its norm layers. Techniques only ever see the weights; federated/statistics.py says what
becomes of the rest. Frozen weights, other whole numbers and what a state_dict leaves out are the same everywhere, and are not sent.
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
    """What the numbers of an entry are, as far as averaging them must know."""

    VALUE = "any number"
    VARIANCE = "never negative"
    COUNTER = "a whole number"


@dataclass(frozen=True)
class LayoutEntry:
    name: str
    shape: tuple[int, ...]
    start: int  # in the row
    trained: bool  # else a statistic
    kind: StatisticKind = StatisticKind.VALUE

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    entries: tuple[LayoutEntry, ...]

    @cached_property
    def size(self) -> int:
        """Numbers in a row."""
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def trained(self) -> int:
        """Numbers of it that are weights; they come first."""
        return max((entry.stop for entry in self.entries if entry.trained), default=0)

    @cached_property
    def weights(self) -> Layout:
        """Of the trained weights alone, as techniques see a model."""
        return Layout(tuple(entry for entry in self.entries if entry.trained))

    @cached_property
    def statistics(self) -> Layout:
        """Of the statistics alone, as a row of their own."""
        return Layout(
            tuple(replace(entry, start=entry.start - self.trained) for entry in self.entries if not entry.trained)
        )

    def marks(self, kind: StatisticKind) -> Tensor:
        """Which numbers of a row are of this kind."""
        found = torch.zeros(self.size, dtype=torch.bool)
        for entry in self.entries:
            if entry.kind is kind:
                found[entry.start : entry.stop] = True
        return found

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of a row by name, or of a matrix of rows, stacked: views of the same memory."""
        lead = rows.shape[:-1]
        return {entry.name: rows[..., entry.start : entry.stop].view((*lead, *entry.shape)) for entry in self.entries}

    def row(self, model: nn.Module) -> Tensor:
        """A model's numbers as a row of their own memory."""
        found = tensors_of(model)
        return torch.cat([found[entry.name].detach().flatten().float() for entry in self.entries])

    def load(self, model: nn.Module, row: Tensor) -> None:
        """Put a row into a model."""
        found = tensors_of(model)
        with torch.no_grad():
            for name, value in self.views(row).items():
                found[name].copy_(value)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layout_of(model: nn.Module) -> Layout:
    """The layout of a model; one whose trained weights are not 32-bit numbers is refused."""
    state = model.state_dict()
    found = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not found:
        raise Mistake("the model has no weight that needs a gradient: there is nothing that devices could train")
    odd = next(((name, one) for name, one in found if one.dtype != torch.float32), None)
    if odd is not None:
        raise Mistake(
            f"the weight {odd[0]} is of {odd[1].dtype}: devices train in torch.float32; make the model with .float()"
        )
    kinds = statistics_of(model)
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


def statistics_of(model: nn.Module) -> dict[str, StatisticKind]:
    """Variances and counters of the model's norm layers, by name. Of other buffers nobody knows what they are."""
    found: dict[str, StatisticKind] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_running_norm(module):
            lead = f"{name}." if name else ""
            found |= {f"{lead}running_var": StatisticKind.VARIANCE, f"{lead}num_batches_tracked": StatisticKind.COUNTER}
    return found


def is_running_norm(module: nn.Module) -> bool:
    """Whether a module normalises by statistics that it keeps: torch's batch norms and instance norms, and classes made of them."""
    return isinstance(module, RUNNING_NORMS) and module.track_running_stats
