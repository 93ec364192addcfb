"""Infer what kind of output a tensor is: change it, and see which changes leave the loss and the metrics the same.

    change                                              no effect on             the output is
    a constant added to every vector along an axis      the loss or a metric     classes along that axis (softmax, argmax)
    a positive factor for every number                  the loss or a metric     binary logits (a threshold at zero)
    a positive factor for every vector along an axis    the loss or a metric     a direction (cosine)
    one number moved far up, or far down                one lowers the loss      a binary logit, if it is the sample's only one
                                                        both raise the loss      a regression

So hand-written losses are understood as well as torch's own. Outputs are changed in place, so that the job's containers
need not be rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.compression.calibration.fidelity import BINARY, COSINE, KL, R2

DRAWS = 3  # random changes of each kind
UNNOTICED = 1e-4  # an effect counts as none below this, relative to the effect of noise as large as the output
FAINT = 1e-5  # relative size of noise that changes every number a little, but no decision
FAR = 1e6  # how far a number is moved, in units of the largest number
MOVED = 8  # how many single numbers are moved

Outcomes = list[float]  # the loss, then the metrics


class Behaviour(NamedTuple):
    """The inferred kind."""

    measure: str
    axis: int
    why: str


class Trial:
    """The loss and the metrics for changed numbers of one output, which is restored afterwards."""

    def __init__(self, output: Tensor, outcomes: Callable[[], Outcomes]) -> None:
        self.output, self.outcomes, self.own = output, outcomes, output.detach().clone()
        self.generator = torch.Generator().manual_seed(0)
        spread = float(self.own.float().std()) if self.own.numel() > 1 else 0.0
        self.size = spread or float(self.own.abs().max()) or 1.0
        self.before = self.of(self.own)

    def of(self, value: Tensor) -> Outcomes:
        with torch.no_grad():
            self.output.copy_(value)
            try:
                return self.outcomes()
            finally:
                self.output.copy_(self.own)

    def random(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator).to(self.own.dtype)

    def difference(self, change: Callable[[], Tensor]) -> Outcomes:
        """The largest change of each outcome over some random changes."""
        found = [self.of(change()) for _ in range(DRAWS)]
        return [
            max((abs(some - before) for some in each), default=0.0)
            for before, each in zip(self.before, zip(*found, strict=True), strict=True)
        ]

    def shift(self, axis: int) -> Tensor:
        return self.own + 3 * self.size * self.random(one_along(self.own, axis))

    def scaling(self, axis: int | None) -> Tensor:
        """A factor for every vector along an axis; None: for every number."""
        return self.own * self.random(self.own.shape if axis is None else one_along(self.own, axis)).exp()

    def noise(self, times: float) -> Tensor:
        return self.own + times * self.size * self.random(self.own.shape)


def one_along(tensor: Tensor, axis: int) -> list[int]:
    return [1 if place == axis else size for place, size in enumerate(tensor.shape)]


def behaviour_of(output: Tensor, outcomes: Callable[[], Outcomes]) -> Behaviour | None:
    """The kind of an output (samples first); None if nothing shows it. `outcomes`: the loss first, then the metrics."""
    if not output.dim() or not output.numel() or not bool(torch.isfinite(output).all()):
        return None
    trial = Trial(output, outcomes)
    loud = trial.difference(lambda: trial.noise(3.0))
    telling = [
        place
        for place, (moved, before) in enumerate(zip(loud, trial.before, strict=True))
        if math.isfinite(moved + before) and moved > 1e-6 * max(abs(before), 1e-30)
    ]
    faint = trial.difference(lambda: trial.noise(FAINT))
    for found, unnoticed, decides in insensitivities(trial):
        for place in telling:
            who = "the loss" if not place else "a metric"
            if unnoticed[place] <= UNNOTICED * loud[place] and (not decides[place] or not faint[place]):
                return found._replace(why=f"{who} {found.why}")
    return effect_of_moves(trial) if 0 in telling else None


def insensitivities(trial: Trial) -> Iterator[tuple[Behaviour, Outcomes, list[bool]]]:
    """Kinds; the effect of the changes that such a kind ignores; and whether only a decision, not a smooth function, is
    evidence for the kind, because a correlation ignores shift and scale too."""
    dims, per_number = trial.own.dim(), trial.difference(lambda: trial.scaling(None))
    nothing = [False] * len(per_number)
    scaled = {axis: trial.difference(lambda: trial.scaling(axis)) for axis in axes_of(trial.own)}  # noqa: B023
    for axis, by_scale in scaled.items():
        by_shift = trial.difference(lambda: trial.shift(axis))  # noqa: B023
        both = [one <= UNNOTICED * max(abs(before), 1e-30) for one, before in zip(by_scale, trial.before, strict=True)]
        yield Behaviour(KL, axis - dims, "does not notice a constant added to each vector"), by_shift, both
    yield Behaviour(BINARY, -1, "notices only signs"), per_number, [True] * len(per_number)
    for axis, by_scale in scaled.items():
        yield Behaviour(COSINE, axis - dims, "does not notice the length of vectors"), by_scale, nothing


def axes_of(tensor: Tensor) -> list[int]:
    """Possible axes of classes or vectors: not the samples' axis; the usual ones first."""
    usual = [1, *range(tensor.dim() - 1, 1, -1)] if tensor.dim() > 3 else list(range(tensor.dim() - 1, 0, -1))
    return [axis for axis in usual if axis < tensor.dim() and tensor.shape[axis] > 1]


def effect_of_moves(trial: Trial) -> Behaviour | None:
    """The effect on the loss of moving single numbers far up or down."""
    count, per_sample = trial.own.numel(), trial.own.numel() // len(trial.own)
    far = FAR * (float(trial.own.abs().max()) + 1)
    ways = []
    for place in range(0, count, max(1, count // MOVED)):
        up, down = (trial.of(with_number(trial.own, place, by))[0] for by in (far, -far))
        if math.isnan(up) or math.isnan(down):
            return None
        ways.append((up > trial.before[0], down > trial.before[0]))
    if all(up and down for up, down in ways):
        return Behaviour(R2, -1, "the loss grows whichever way a number moves")
    if per_sample == 1 and {(True, False), (False, True)} == set(ways):
        return Behaviour(BINARY, -1, "the loss falls the further a number moves to one side, its sample's")
    return None


def with_number(tensor: Tensor, place: int, by: float) -> Tensor:
    """A copy with a single number changed."""
    found = tensor.clone(memory_format=torch.contiguous_format)
    found.view(-1)[place] += by
    return found
