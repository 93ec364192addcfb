"""What stands between a weight and the layer that uses it: it says which of its numbers are zero."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """A parametrization of torch: `forward` gives the weight as its layer sees it. This one has a mask, which somebody else sets.

    All that a gate knows of the training is in its buffers, so that a run which was killed goes on with the same bits.
    """

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones_like(weight, dtype=torch.bool))
        self.orders: tuple[
            tuple[str, ...], ...
        ] = ()  # of each layer that uses the weight, the names of its own parameters
        self.noisy = True  # what is drawn counts; set before every forward in training

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask

    def draw(self) -> None:
        """Draw what a forward in training needs, once for all who use the weight in it."""

    def leave(self) -> None:
        """Take away what it has put on its layer beside itself."""

    def check_used(self, name: str) -> None:
        """After a forward in training: refuse a use of the weight that would not be trained right."""

    def kept(self, weight: Tensor) -> Tensor:
        """True where the weight is not zero after training."""
        return self.mask

    def scores(self, weight: Tensor) -> Tensor:
        """How much each number is worth keeping. What is gone once gets no gradient, so it is worth less than everything else."""
        return weight.detach().abs().masked_fill(~self.mask, -1.0)

    def penalty(self, weight: Tensor) -> Tensor:
        """What the loss has to pay for its numbers that are not zero; a sum over them."""
        return weight.new_zeros(())

    def fix(self, mask: Tensor, weight: Tensor) -> None:
        """From now on exactly this stays."""
        self.mask.copy_(mask)


class TrainedGate(Gate, ABC):
    """Abstract. Numbers that are trained say what stays, until the mask is fixed; then the weight is trained on under its mask."""

    fixed: Tensor

    def __init__(self, weight: Tensor, pace: float, first: float) -> None:
        super().__init__(weight)
        self.pace = pace
        # `pace` x this is what the method's formulas are about, so that an optimizer moves it `pace` times as fast as a weight
        self.raw = nn.Parameter(torch.full_like(weight, first / pace))
        self.register_buffer("fixed", torch.zeros((), dtype=torch.bool, device=weight.device))

    @property
    def trained(self) -> Tensor:
        return self.pace * self.raw

    @abstractmethod
    def rule(self, weight: Tensor) -> Tensor:
        """What the weight is multiplied with after training, by the method's own rule."""

    def settled(self, weight: Tensor) -> Tensor:
        """The weight after training: by the mask if it is fixed, else by the rule."""
        return weight * torch.where(self.fixed, self.mask.to(weight.dtype), self.rule(weight))

    def kept(self, weight: Tensor) -> Tensor:
        return torch.where(self.fixed, self.mask, self.rule(weight) > 0)

    def fix(self, mask: Tensor, weight: Tensor) -> None:
        """The mask is final. What the rule multiplies with becomes part of the weight."""
        with torch.no_grad():
            weight.mul_(self.rule(weight))
        self.fixed.fill_(True)
        super().fix(mask, weight)
