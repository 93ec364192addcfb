"""Memory reused by all chunks. Fresh memory costs a page fault every 4 KiB, which takes longer than the computation in it."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Workspace:
    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor. The same name gives the same memory."""
        size = prod(shape)
        if name not in self.kept or self.kept[name].numel() < size:
            self.kept[name] = torch.empty(size)
        return self.kept[name][:size].view(shape)
