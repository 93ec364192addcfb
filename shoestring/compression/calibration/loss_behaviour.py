"""Infer what kind of output a tensor is by changing it, and watching which changes the loss and the metrics do not notice.

    change                                              not noticed              the output is
    a constant added to every vector along an axis      by the loss or a metric  classes along that axis (softmax, argmax)
    a positive factor for every number                  by the loss or a metric  binary logits (a threshold at zero)
    a positive factor for every vector along an axis    by the loss or a metric  a direction (cosine)
    one number moved far up, or far down                one lowers the loss      a binary logit, if it is the sample's only one
                                                        both raise the loss      a regression

So losses written by hand, with whatever functions, tell as much as torch's own. Outputs are changed in place, so that no
container of the job's has to be built again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.compression.calibration.fidelity import BINARY, COSINE, KL, R2

DRAWS = 3  # random changes of a kind
UNNOTICED = 1e-4  # relative to what noise of the output's own size does
FAINT = 1e-5  # of the output's size: noise that changes every number a little, and no decision
FAR = 1e6  # times the largest number
MOVED = 8  # single numbers that are moved

Outcomes = list[float]  # the loss, and the metrics


class Behaviour(NamedTuple):
    """The kind that was inferred."""

    measure: str
    axis: int
    why: str


class Trial:
    """What the loss and the metrics give for changed numbers of one output, which has its own again afterwards."""

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
        """How far each outcome moves in some random changes, at most."""
        found = [self.of(change()) for _ in range(DRAWS)]
        return [
            max((abs(some - before) for some in each), default=0.0)
            for before, each in zip(self.before, zip(*found, strict=True), strict=True)
        ]

    def shift(self, axis: int) -> Tensor:
        return self.own + 3 * self.size * self.random(one_along(self.own, axis))

    def scaling(self, axis: int | None) -> Tensor:
        """Of every vector along an axis; None: of every number."""
        return self.own * self.random(self.own.shape if axis is None else one_along(self.own, axis)).exp()

    def noise(self, times: float) -> Tensor:
        return self.own + times * self.size * self.random(self.own.shape)


def one_along(tensor: Tensor, axis: int) -> list[int]:
    return [1 if place == axis else size for place, size in enumerate(tensor.shape)]


def behaviour_of(output: Tensor, outcomes: Callable[[], Outcomes]) -> Behaviour | None:
    """The kind of an output (samples first); None if nothing tells. `outcomes`: the loss first, then the metrics."""
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
    return moved_far(trial) if 0 in telling else None


def insensitivities(trial: Trial) -> Iterator[tuple[Behaviour, Outcomes, list[bool]]]:
    """Kinds, how far outcomes move in the changes that such a kind does not notice, and whether only a decision (no
    function that is smooth) tells of that kind: a correlation, too, notices neither shift nor scale."""
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
    """Axes that may be those of classes or of vectors: not the samples', and the usual ones first."""
    usual = [1, *range(tensor.dim() - 1, 1, -1)] if tensor.dim() > 3 else list(range(tensor.dim() - 1, 0, -1))
    return [axis for axis in usual if axis < tensor.dim() and tensor.shape[axis] > 1]


def moved_far(trial: Trial) -> Behaviour | None:
    """What the loss does if single numbers are moved far up or down."""
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
    """A copy with a single number moved."""
    found = tensor.clone(memory_format=torch.contiguous_format)
    found.view(-1)[place] += by
    return found
