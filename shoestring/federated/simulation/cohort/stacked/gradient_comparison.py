"""Compares gradients of the stacked method with those of the plain loop during a run.

For every new shape of a step, one device's gradient in the stack is compared with the gradient of the model alone, with
the same weights and samples. It compares single gradients instead of whole updates, because rounding grows from step to
step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from shoestring.core.batch import Batch, map_leaves
from shoestring.core.running import random_state
from shoestring.federated.simulation.cohort.dropout import NoDropout
from shoestring.federated.simulation.cohort.method import MethodDiffers
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, load_device
from shoestring.federated.simulation.cohort.stacked.recording import Gradients, Weights

CLOSE = 1e-3  # largest allowed relative difference: rounding is far below it, another loss far above
ABSOLUTE = 1e-4  # allowed difference of losses, which may be 0
ATTEMPTS = 3  # if the last bit decides a maximum, or a gradient nearly vanishes, try again with slightly other weights
NEARBY = 1e-2  # relative change of the weights for another attempt


class GradientComparison:
    def __init__(self, plain: SequentialMethod, gradients: Gradients, draws: bool) -> None:
        self.plain, self.gradients, self.draws = plain, gradients, draws
        self.seen: set[tuple[object, ...]] = set()

    def check(self, weights: Weights, batch: Callable[[], Batch], shares: Tensor | None, counts: Tensor) -> None:
        """If the step's shape is new, compare the device with the fewest samples. `batch` makes a new batch for every
        try, because a step may change its batch in place."""
        shape = (shares is None, *counts.tolist())
        if shape in self.seen:
            return
        self.seen.add(shape)
        row = int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
        generator = torch.Generator().manual_seed(0)
        for attempt in range(ATTEMPTS):
            near = {
                name: one if not attempt else one * (1 + NEARBY * torch.randn(one.shape, generator=generator))
                for name, one in weights.items()
            }
            if (apart := self.relative_difference(near, batch, shares, row, int(counts[row]))) <= CLOSE:
                return
        raise MethodDiffers(
            f"the gradient of a device with a batch of {int(counts[row])} samples, beside others with up to {int(counts.max())}, "
            f"differs from the plain loop's by {apart:.1g} of its size"
        )

    def relative_difference(
        self, weights: Weights, batch: Callable[[], Batch], shares: Tensor | None, row: int, size: int
    ) -> float:
        """Relative difference of a device's gradient, or of its loss if that is larger, from the plain loop's."""
        call = (
            self.gradients.without_recording if self.draws else self.gradients
        )  # a recording would contain the dropout
        with random_state.fork_rng(), NoDropout() if self.draws else nullcontext():
            losses, found = call(weights, batch(), shares)
            loss, right = self.plain_gradients(
                {name: one[row] for name, one in weights.items()}, map_leaves(lambda leaf: leaf[row, :size], batch())
            )
        if not all(one.isfinite().all() for one in right):
            return 0.0  # a device that diverges will be rejected anyway
        squares = sum(
            float((one if other is None else one - other[row]).double().square().sum())
            for one, other in zip(right, found, strict=True)
        )
        whole = sum(float(one.double().square().sum()) for one in right)
        return max((squares / whole) ** 0.5 if whole else float(squares > 0), loss_difference(losses[row], loss))

    def plain_gradients(self, weights: Weights, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Loss and weight gradients of the model alone."""
        plain, model = self.plain, self.plain.model
        row = torch.empty(plain.layout.size)
        for name, view in plain.layout.views(row).items():
            view.copy_(weights[name])
        load_device(plain.layout, model, row, plain.outside)
        inside = dict(model.named_parameters())
        with torch.enable_grad():
            loss = plain.job.loss(plain.job.forward(model, batch), batch)
            loss.backward()
        found = [torch.zeros_like(inside[name]) if inside[name].grad is None else inside[name].grad for name in weights]
        model.zero_grad(set_to_none=True)
        return loss.detach(), [one for one in found if one is not None]


def loss_difference(found: Tensor, right: Tensor) -> float:
    """Relative difference of two losses; both may be infinite or not a number, like those of a batch without targets.

    >>> loss_difference(torch.tensor(2.0), torch.tensor(1.0)), loss_difference(torch.tensor(1.0), torch.tensor(torch.nan))
    (1.0, inf)
    >>> loss_difference(torch.tensor(torch.nan), torch.tensor(torch.nan))
    0.0
    """
    if bool(found == right) or bool(found.isnan() & right.isnan()):
        return 0.0
    off = float((found - right).abs())
    return 0.0 if off <= ABSOLUTE else off / float(right.abs()) if off < float("inf") else float("inf")
