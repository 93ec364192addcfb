"""A step of stacked devices beside the same step of the plain loop, while devices work.

Of every shape of a chunk's steps, one device: its gradient in the stack against that of the model by itself, with the same weights and
samples. Only gradients are compared, of one step, so that rounding does not grow from step to step, as it does in a device's whole work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from shoestring.core import random_state
from shoestring.core.batch import Batch, mapped
from shoestring.federated.simulation.cohort.dropout import NoDropout
from shoestring.federated.simulation.cohort.recorded import Gradients, Weights
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, load
from shoestring.federated.simulation.cohort.way import Differs

CLOSE = 1e-3  # largest difference of two gradients, relative to the plain one: rounding is far below, another loss far above
ABSOLUTE = 1e-4  # of losses, which may be 0
ATTEMPTS = (
    3  # where a maximum is decided by the last bit, or a gradient nearly vanishes, others with nearby weights say more
)
NEARBY = 1e-2  # relative


class GradientComparison:
    def __init__(self, plain: SequentialMethod, gradients: Gradients, draws: bool) -> None:
        self.plain, self.gradients, self.draws = plain, gradients, draws
        self.seen: set[tuple[object, ...]] = set()

    def check(self, weights: Weights, batch: Callable[[], Batch], shares: Tensor | None, counts: Tensor) -> None:
        """Compare one device of a step whose shape is new: the one with the fewest samples. A step may change its batch, so it is made
        anew for each that is tried."""
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
            if (apart := self.apart(near, batch, shares, row, int(counts[row]))) <= CLOSE:
                return
        raise Differs(
            f"the gradient of a device with a batch of {int(counts[row])} samples, beside others with up to {int(counts.max())}, "
            f"differs from the plain loop's by {apart:.1g} of its size"
        )

    def apart(self, weights: Weights, batch: Callable[[], Batch], shares: Tensor | None, row: int, size: int) -> float:
        """How far a device's gradient, or its loss, is from the plain one."""
        call = self.gradients.live if self.draws else self.gradients  # a recording would have the dropout in it
        with random_state.kept(), NoDropout() if self.draws else nullcontext():
            losses, found = call(weights, batch(), shares)
            loss, right = self.plain_gradients(
                {name: one[row] for name, one in weights.items()}, mapped(lambda leaf: leaf[row, :size], batch())
            )
        if not all(one.isfinite().all() for one in (loss, *right)):
            return 0.0  # a device that diverges is rejected for that
        squares = sum(
            float((one if other is None else one - other[row]).double().square().sum())
            for one, other in zip(right, found, strict=True)
        )
        whole = sum(float(one.double().square().sum()) for one in right)
        off = float((losses[row] - loss).abs())
        return max(
            (squares / whole) ** 0.5 if whole else float(squares > 0),
            0.0 if off <= ABSOLUTE else off / float(loss.abs()),
        )

    def plain_gradients(self, weights: Weights, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The model by itself: its loss, and the gradient of every weight."""
        plain, model = self.plain, self.plain.model
        row = torch.empty(plain.layout.size)
        for name, view in plain.layout.views(row).items():
            view.copy_(weights[name])
        load(plain.layout, model, row, plain.beside)
        inside = dict(model.named_parameters())
        with torch.enable_grad():
            loss = plain.job.loss(plain.job.forward(model, batch), batch)
            loss.backward()
        found = [torch.zeros_like(inside[name]) if inside[name].grad is None else inside[name].grad for name in weights]
        model.zero_grad(set_to_none=True)
        return loss.detach(), [one for one in found if one is not None]
