"""Memory reused by all chunks. Fresh memory costs a page fault every 4 KiB, which takes longer than the computation in
it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shoestring.federated.model.layout import Layout
from shoestring.federated.simulation.cohort.step_table import StepTable


class Workspace:
    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor. The same name gives the same memory."""
        size = prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = torch.empty(size)
        return self.kept[name][:size].view(shape)


@dataclass(frozen=True)
class FusedChunk:
    """What all layers of a chunk share. Stacked tensors have their rows in the order of `table`; `start` and `rows` in
    that of the devices."""

    layout: Layout
    start: Tensor  # (k, size): where each device begins
    rows: Tensor  # (k, size): the devices' updates, to be filled
    table: StepTable
    workspace: Workspace
