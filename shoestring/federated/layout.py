"""A model as one row of numbers: what devices are given, train and send is such a row, and the rows of many devices are a matrix.

In it are the weights that are trained and the floating-point buffers that a model's state has (the statistics of a batch norm), the
weights first. Frozen weights, whole numbers and what a state_dict leaves out are the same everywhere, and are not sent.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    start: int          # in the row
    trained: bool       # else a buffer

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]

    @cached_property
    def size(self) -> int:
        """Numbers in a row."""
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def trained(self) -> int:
        """Numbers of it that are weights; they come first."""
        return max((entry.stop for entry in self.entries if entry.trained), default=0)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of a row by name, or of a matrix of rows, stacked: views of the same memory."""
        lead = rows.shape[:-1]
        return {entry.name: rows[..., entry.start:entry.stop].view(*lead, *entry.shape) for entry in self.entries}

    def row(self, model: nn.Module) -> Tensor:
        """A model's numbers as a row of their own memory."""
        found = tensors_of(model)
        return torch.cat([found[entry.name].detach().flatten() for entry in self.entries])

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
    found: list[tuple[str, Tensor, bool]] = [(name, one, True) for name, one in model.named_parameters() if one.requires_grad]
    if not found:
        raise Mistake("the model has no weight that needs a gradient: there is nothing that devices could train")
    odd = next(((name, one) for name, one, _ in found if one.dtype != torch.float32), None)
    if odd is not None:
        raise Mistake(f"the weight {odd[0]} is of {odd[1].dtype}: devices train in torch.float32; make the model with .float()")
    found += [(name, one, False) for name, one in model.named_buffers() if name in state and one.dtype == torch.float32]
    entries, start = [], 0
    for name, one, trained in found:
        entries.append(Entry(name, tuple(one.shape), start, trained))
        start = entries[-1].stop
    return Layout(tuple(entries))
