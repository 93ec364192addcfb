"""Fidelity: how close what a smaller model says is to what the original says. No labels are needed.

    cosine    1 - |a/|a| - b/|b||^2 / 2      of every vector along an axis: embeddings
    kl        exp(-KL(softmax b || softmax a))   of every vector along the class axis: logits, or probabilities
    binary    exp(-KL(sigmoid b || sigmoid a))   of every number: logits of yes or no, or their probabilities
    r2        1 - (a - b)^2 / variance of b      of every sample: regressions; the mean is R^2 with the original's outputs as targets

a: the smaller model's, b: the original's. All are 1 for the same outputs, and what is missing to 1 is the damage. Damages of single weights
add up, because errors of different weights are hardly correlated and outputs are nearly linear in small ones (decisions/021 has figures).
Of several outputs the one with the most damage leads: its fidelity is the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.calibration.answers import Answer, answer, compared_names
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake

COSINE, KL, BINARY, R2 = MEASURES = ("cosine", "kl", "binary", "r2")
Forward = Callable[[nn.Module, Batch], Any]
TOUCHING = 1e-7  # probabilities are kept so far from 0 and 1
OWN = (
    16  # numbers of a sample up to which each is compared with its own variance; more are one vector with one variance
)
AT_ONCE = 1 << 18  # numbers that are compared at once in double precision
CONSTANT = 1e-10  # of its mean square: a variance below that is rounding


@dataclass(frozen=True)
class OutputMeasure:
    """How one output is compared."""

    name: str
    measure: str
    axis: int = -1  # of classes, or of the numbers of a vector
    why: str = ""  # this measure, in words
    probabilities: bool = False  # numbers are probabilities already, not logits
    variance: tuple[float, ...] = ()  # r2: of the original's numbers, each or all together


@dataclass(frozen=True)
class OutputFidelity:
    """How close one output is."""

    name: str
    measure: str
    mean: float
    worst: float
    count: int  # vectors or numbers that were compared,
    samples: int  # of so many samples
    standard_error: float | None  # of the mean, by what samples differ

    @property
    def damage(self) -> float:
        return 1 - self.mean


@dataclass(frozen=True)
class Fidelity:
    """Of all outputs; the figures are those of the one with the most damage, but the worst is that of all."""

    mean: float
    worst: float
    count: int
    outputs: tuple[OutputFidelity, ...] = ()

    @classmethod
    def of(cls, outputs: Sequence[OutputFidelity]) -> Fidelity:
        leading = max(outputs, key=lambda one: one.damage)
        return cls(leading.mean, min(one.worst for one in outputs), leading.count, tuple(outputs))

    @property
    def damage(self) -> float:
        return 1 - self.mean

    @property
    def damages(self) -> tuple[float, ...]:
        """Of every output."""
        return tuple(one.damage for one in self.outputs)

    @property
    def leading(self) -> OutputFidelity | None:
        return max(self.outputs, key=lambda one: one.damage, default=None)


def outputs(
    model: nn.Module, forward: Forward, batches: Iterable[Batch], measures: Sequence[OutputMeasure] = ()
) -> list[Answer]:
    """What a model says, batch by batch: the outputs that are measured, or all that count."""
    names = [one.name for one in measures]
    with torch.no_grad():
        said = []
        for batch in batches:
            given = forward(model, batch)
            said.append(answer(given, names or compared_names(given)))
    return said


def fidelity(found: Sequence[Answer], wanted: Sequence[Answer], measures: Sequence[OutputMeasure] = ()) -> Fidelity:
    """Vectors with numbers that are not finite have fidelity 0; where the original's are not, nothing can be said. Without `measures`, what
    suits the original's numbers."""
    chosen = measures or [by_numbers(name, [one[name] for one in wanted]) for name in wanted[0]]
    comparison = FidelitySums(chosen)
    for one, other in zip(found, wanted, strict=True):
        comparison.add(one, other)
    return comparison.fidelity


class FidelitySums:
    """Answers that are compared batch by batch. Sums of samples are kept, and no answers: those of a language model, with every word of its
    vocabulary at every place of a text, are many times as large as the model."""

    def __init__(self, measures: Sequence[OutputMeasure]) -> None:
        self.outputs = [OutputComparison(one) for one in measures]

    def add(self, found: Answer, wanted: Answer) -> None:
        """One batch."""
        for one in self.outputs:
            one.add(found[one.how.name], wanted[one.how.name])

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.of([one.fidelity for one in self.outputs])

    @property
    def finite(self) -> bool:
        """Whether all numbers were that were compared with the original's."""
        return all(one.finite for one in self.outputs)


class OutputComparison:
    """Of one output. Samples are the first dimension; they may have different numbers of vectors."""

    def __init__(self, how: OutputMeasure) -> None:
        self.how, self.worst, self.finite = how, 0.0, True
        self.sums: list[Tensor] = []  # of the damages of every sample's vectors,
        self.counts: list[Tensor] = []  # which are so many

    def add(self, found: Tensor, wanted: Tensor) -> None:
        if not finite(wanted):
            raise Mistake(
                f"the original's {self.how.name} has numbers that are not finite: there is nothing to compare with; choose other "
                f"outputs with --output"
            )
        self.finite = self.finite and finite(found)
        lost = damages(found, wanted, self.how)
        lost = torch.where(torch.isfinite(lost), lost, 1.0)
        lost = lost.reshape(len(lost), -1) if lost.dim() else lost.reshape(1, 1)
        self.sums.append(lost.sum(1))
        self.counts.append(torch.full((len(lost),), float(lost.shape[1]), dtype=torch.float64))
        self.worst = max(self.worst, float(lost.max())) if lost.numel() else self.worst

    @property
    def fidelity(self) -> OutputFidelity:
        each, weight = torch.cat(self.sums), torch.cat(self.counts)
        whole, samples = max(float(weight.sum()), 1.0), len(each)
        mean = float(each.sum()) / whole
        spread = (
            float(((each - mean * weight) / whole).square().sum()) * samples / (samples - 1) if samples > 1 else None
        )
        return OutputFidelity(
            self.how.name,
            self.how.measure,
            1 - mean,
            1 - self.worst,
            int(whole),
            samples,
            None if spread is None else math.sqrt(spread),
        )


def damages(found: Tensor, wanted: Tensor, how: OutputMeasure) -> Tensor:
    """What is missing to fidelity 1, of every vector; in double precision, because small ones are differences of nearly equal numbers.

    >>> damages(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), OutputMeasure("output", "cosine"))
    tensor([0.2929], dtype=torch.float64)
    >>> damages(torch.tensor([[100.0], [101.0]]), torch.tensor([[100.0], [102.0]]), OutputMeasure("y", "r2", variance=(2.0,)))
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    if found.shape != wanted.shape:
        raise Mistake(
            f"the output {how.name} has another shape, {list(found.shape)}, than the original's, {list(wanted.shape)}: what "
            f"depends on what was computed before, on chance, or on how many there are (boxes after a threshold) can't be "
            f"compared; choose other outputs with --output"
        )
    if how.measure == R2:
        return relative_errors(found.double(), wanted.double(), how)
    if how.measure == BINARY:
        a, b = found.double(), wanted.double()
        return -torch.expm1(-bernoulli_divergence(*(logits(one) if how.probabilities else one for one in (a, b))))
    a, b = found.movedim(how.axis, -1), wanted.movedim(how.axis, -1)
    if not a.numel():
        return vector_damages(a.double(), b.double(), how)
    some = max(1, AT_ONCE // a.shape[-1])  # vectors
    rows = zip(*(one.reshape(-1, one.shape[-1]).split(some) for one in (a, b)), strict=True)
    return torch.cat([vector_damages(one.double(), other.double(), how) for one, other in rows]).reshape(a.shape[:-1])


def vector_damages(a: Tensor, b: Tensor, how: OutputMeasure) -> Tensor:
    """Of vectors along the last axis."""
    if how.measure == KL:
        log_a, log_b = ((one.clamp(min=TOUCHING).log() if how.probabilities else one).log_softmax(-1) for one in (a, b))
        return -torch.expm1(-(log_b.exp() * (log_b - log_a)).sum(-1).clamp(min=0))
    lengths = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    gap = a / lengths[0].clamp(min=1e-300) - b / lengths[1].clamp(min=1e-300)
    return torch.where(both_zero[..., 0], 0.0, gap.square().sum(-1) / 2)


def relative_errors(a: Tensor, b: Tensor, how: OutputMeasure) -> Tensor:
    """Squared errors as shares of a variance, of every sample the mean."""
    error = (a - b).square()
    if not a.dim():
        error = error.reshape(1)
    if len(how.variance) > 1:
        shape = [1] * error.dim()
        shape[how.axis] = len(how.variance)
        error = error / error.new_tensor(how.variance).reshape(shape)
    else:
        error = error / how.variance[0]
    return error.reshape(len(error), -1).mean(1) if error.numel() else error.reshape(-1)


def logits(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(TOUCHING, 1 - TOUCHING).logit()


def bernoulli_divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(sigmoid b || sigmoid a) of every number."""
    log = torch.nn.functional.logsigmoid
    found = b.sigmoid() * (log(b) - log(a)) + (-b).sigmoid() * (log(-b) - log(-a))
    return found.clamp(min=0) if found.dim() else found.reshape(1).clamp(min=0)


def finite(said: Tensor) -> bool:
    """A sum is finite only if all numbers are, and is had in a tenth of the time; but it can overflow."""
    return bool(torch.isfinite(said.sum())) or bool(torch.isfinite(said).all())


# What suits an output's numbers

OFFSET = 0.9  # share of the mean square that is the mean vector's: above, all vectors point the same way and cosines say nothing


def feature_axis(tensor: Tensor) -> int:
    """Channels of pictures, else the last."""
    return 1 if tensor.dim() > 3 else -1


def by_numbers(name: str, said: Sequence[Tensor]) -> OutputMeasure:
    """What suits an output of which only its numbers are known."""
    first = said[0]
    axis = feature_axis(first)
    if first.dim() < 2 or first.shape[axis] == 1:
        return with_variance(OutputMeasure(name, R2, axis, "single numbers"), said)
    for one in dict.fromkeys((axis, -1)):
        if are_probabilities(said, one):
            return OutputMeasure(name, KL, one, "probabilities that add up to 1", probabilities=True)
    if name.rpartition(".")[2] == "logits":
        return OutputMeasure(name, KL, axis, "it is called logits")
    rows = vectors(said, axis)
    if (
        len(rows) > 1
        and rows.shape[1] > 1
        and float(rows.mean(0).square().sum()) > OFFSET * float(rows.square().sum(1).mean())
    ):
        return with_variance(OutputMeasure(name, R2, axis, "vectors that all point nearly the same way"), said)
    return OutputMeasure(name, COSINE, axis, "vectors")


def vectors(said: Sequence[Tensor], axis: int) -> Tensor:
    """All vectors along an axis as rows; single numbers, where there are none, or where batches have vectors of different lengths."""
    lengths = {one.shape[axis] if one.dim() > 1 else 1 for one in said}
    width = lengths.pop() if len(lengths) == 1 else 1
    return torch.cat([(one.movedim(axis, -1) if width > 1 else one).double().reshape(-1, width) for one in said])


def are_probabilities(said: Sequence[Tensor], axis: int) -> bool:
    return all(bool((one >= 0).all()) and bool(((one.double().sum(axis) - 1).abs() < 1e-3).all()) for one in said)


def with_variance(how: OutputMeasure, said: Sequence[Tensor]) -> OutputMeasure:
    """The measure with the variances of an output's numbers: of each, if they are few, else one. A number that is always the same has its
    mean square instead."""
    rows = vectors(said, how.axis)
    square, variance = rows.square().mean(0), rows.var(0, correction=0)
    known = torch.where(variance > CONSTANT * square, variance, square)
    known = torch.where(known > 0, known, 1.0)
    told = known.tolist() if len(known) <= OWN else [float(known.mean())]
    return OutputMeasure(how.name, how.measure, how.axis, how.why, how.probabilities, tuple(told))
