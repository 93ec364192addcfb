"""Fidelity: how close a compressed model's outputs are to the original's. No labels are needed.

    cosine    1 - |a/|a| - b/|b||^2 / 2          per vector along an axis: embeddings
    kl        exp(-KL(softmax b || softmax a))   per vector along the class axis: class logits or probabilities
    binary    exp(-KL(sigmoid b || sigmoid a))   per number: binary logits or probabilities
    r2        1 - (a - b)^2 / variance of b      per sample: regressions; the mean is R^2 with the original's outputs as targets

a: output of the compressed model, b: of the original. Fidelity is 1 for equal outputs; damage = 1 - fidelity. Damages
of single weights add up, because errors of different weights are hardly correlated and outputs are nearly linear in
small errors (decisions/021 has figures). If a model has several outputs, its fidelity is that of the most damaged one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.calibration.model_outputs import Outputs, compared_names, select_outputs
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake

COSINE, KL, BINARY, R2 = MEASURES = ("cosine", "kl", "binary", "r2")
Forward = Callable[[nn.Module, Batch], Any]
TOUCHING = 1e-7  # probabilities are clamped to stay this far from 0 and 1
OWN = 16  # outputs with up to this many numbers per sample have a variance for each; larger ones have one variance
AT_ONCE = 1 << 18  # numbers compared at once in double precision
ROUNDING = 2.0  # numbers that vary by less than this many units in the last place of their size are constant
SURELY = 3.09  # standard deviations: 1 in 1000 normal numbers lies above


@dataclass(frozen=True)
class OutputMeasure:
    """How to compare one output."""

    name: str
    measure: str
    axis: int = -1  # class axis, or the axis of a vector's numbers
    why: str = ""  # reason for this measure, for the user
    probabilities: bool = False  # values are probabilities, not logits
    variance: tuple[float, ...] = ()  # for r2: variance of the original's outputs, per number or one for all


@dataclass(frozen=True)
class OutputFidelity:
    """Fidelity of one output."""

    name: str
    measure: str
    mean: float
    worst: float
    count: int  # vectors or numbers compared
    samples: int  # number of samples they came from
    standard_error: (
        float | None
    )  # of the mean, from the variance between samples, or between batches where these are alike inside

    @property
    def damage(self) -> float:
        return 1 - self.mean


@dataclass(frozen=True)
class Fidelity:
    """Fidelity of a model. Mean and count are those of the most damaged output; `worst` is the minimum over all
    outputs."""

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
        """Damage of every output."""
        return tuple(one.damage for one in self.outputs)

    @property
    def leading(self) -> OutputFidelity | None:
        return max(self.outputs, key=lambda one: one.damage, default=None)


def collect_outputs(
    model: nn.Module, forward: Forward, batches: Iterable[Batch], measures: Sequence[OutputMeasure] = ()
) -> list[Outputs]:
    """Run a model on batches and collect the outputs with measures, or all that are compared by default."""
    names = [one.name for one in measures]
    with torch.no_grad():
        said = []
        for batch in batches:
            given = forward(model, batch)
            said.append(select_outputs(given, names or compared_names(given)))
    return said


def fidelity(found: Sequence[Outputs], wanted: Sequence[Outputs], measures: Sequence[OutputMeasure] = ()) -> Fidelity:
    """Fidelity of outputs `found` to the original's outputs `wanted`, given batch by batch.

    Vectors that are not finite have fidelity 0; if the original's are not finite, Mistake is raised. Without
    `measures`, they are inferred from the original's values.
    """
    chosen = measures or [measure_from_values(name, [one[name] for one in wanted]) for name in wanted[0]]
    comparison = FidelitySums(chosen)
    for one, other in zip(found, wanted, strict=True):
        comparison.add(one, other)
    return comparison.fidelity


class FidelitySums:
    """Running fidelity over batches. It keeps sums per sample and no outputs: a language model's logits over many texts
    are many times as large as the model."""

    def __init__(self, measures: Sequence[OutputMeasure]) -> None:
        self.outputs = [OutputComparison(one) for one in measures]

    def add(self, found: Outputs, wanted: Outputs) -> None:
        """Add one batch."""
        for one in self.outputs:
            one.add(found[one.how.name], wanted[one.how.name])

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.of([one.fidelity for one in self.outputs])

    @property
    def finite(self) -> bool:
        """Whether all compared outputs were finite."""
        return all(one.finite for one in self.outputs)


class OutputComparison:
    """Running fidelity of one output. Samples are the first dimension; they may have different numbers of vectors."""

    def __init__(self, how: OutputMeasure) -> None:
        self.how, self.worst, self.finite = how, 0.0, True
        self.sums: list[Tensor] = []  # per sample: sum of its vectors' damages
        self.counts: list[Tensor] = []  # per sample: number of vectors

    def add(self, found: Tensor, wanted: Tensor) -> None:
        if not all_finite(wanted):
            raise Mistake(
                f"the original's {self.how.name} has numbers that are not finite, so nothing can be compared with it; choose "
                f"other outputs with --output"
            )
        self.finite = self.finite and all_finite(found)
        lost = damage_per_vector(found, wanted, self.how)
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
        by_batch = [sums - mean * counts for sums, counts in zip(self.sums, self.counts, strict=True)]
        variance = variance_of_mean(torch.cat(by_batch) / whole, torch.stack([one.sum() for one in by_batch]) / whole)
        return OutputFidelity(
            self.how.name,
            self.how.measure,
            1 - mean,
            1 - self.worst,
            int(whole),
            samples,
            None if variance is None else math.sqrt(variance),
        )


def variance_of_mean(samples: Tensor, batches: Tensor) -> float | None:
    """Variance of a mean, given what every sample and every batch adds to it beyond the mean.

        n / (n - 1)  sum of squares          of n samples, as if they were independent; of n batches, where they are not

    In contrastive models every sample is compared with all of its batch, so the samples of a batch go wrong together. Batches count if
    their variance exceeds the samples' by more than chance explains: (k - 1) times the ratio is about chi-squared of k - 1 degrees for k
    independent batches, whose 99.9th percentile is Wilson and Hilferty's (1931, doi 10.1073/pnas.17.12.684).

    >>> independent, alike = torch.tensor([1.0, -1.0] * 50), torch.tensor([1.0] * 50 + [-1.0] * 50)
    >>> [round(variance_of_mean(one, one.view(10, 10).sum(1)), 1) for one in (independent, alike)]
    [101.0, 1111.1]
    """
    of_samples, of_batches = (
        float(one.square().sum()) * len(one) / (len(one) - 1) if len(one) > 1 else None for one in (samples, batches)
    )
    if of_samples is None or of_batches is None:
        return of_samples
    step = 2 / (9 * (len(batches) - 1))
    by_chance = (1 - step + SURELY * math.sqrt(step)) ** 3
    return of_batches if of_batches > by_chance * of_samples else of_samples


def error_among_few(few: OutputFidelity, many: OutputFidelity) -> float | None:
    """Standard error of the mean of a few samples, when more of the same kind are known. A few may have missed the rare
    samples that hold most of the damage (of a model that is sure of nearly all answers); then their own variance is too
    small, and that of the many counts.

    >>> few, many = (OutputFidelity("y", KL, 1.0, 1.0, n, n, error) for n, error in ((100, 0.1), (400, 0.2)))
    >>> error_among_few(few, many), error_among_few(many, few)
    (0.4, 0.2)
    """
    if few.standard_error is None or many.standard_error is None or few.samples >= many.samples:
        return few.standard_error
    return max(few.standard_error, many.standard_error * math.sqrt(many.samples / few.samples))


def vectors_in(tensor: Tensor, how: OutputMeasure) -> int:
    """How many vectors an output has, or how many numbers if each is compared by itself.

    >>> vectors_in(torch.zeros(2, 64, 8000), OutputMeasure("logits", "r2", -1))
    128
    """
    return (
        tensor.numel()
        if how.measure == BINARY or not tensor.dim()
        else tensor.numel() // max(tensor.shape[how.axis], 1)
    )


def damage_per_vector(found: Tensor, wanted: Tensor, how: OutputMeasure) -> Tensor:
    """Damage, 1 - fidelity, of every vector; in double precision, because it is a difference of nearly equal numbers.

    >>> damage_per_vector(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), OutputMeasure("output", "cosine"))
    tensor([0.2929], dtype=torch.float64)
    >>> damage_per_vector(torch.tensor([[100.0], [101.0]]), torch.tensor([[100.0], [102.0]]), OutputMeasure("y", "r2", variance=(2.0,)))
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    if found.shape != wanted.shape:
        raise Mistake(
            f"the output {how.name} has the shape {list(found.shape)}, and the original's {list(wanted.shape)}: outputs whose "
            f"shape depends on the values (boxes above a threshold), on chance or on earlier calls can't be compared; choose "
            f"other outputs with --output"
        )
    if how.measure == R2:
        return relative_errors(found, wanted, how)
    if how.measure == BINARY:
        numbers = zip(*(one.reshape(-1).split(AT_ONCE) for one in (found, wanted)), strict=True)
        return torch.cat([number_damages(one.double(), other.double(), how) for one, other in numbers]).view(
            found.shape or 1
        )
    a, b = found.movedim(how.axis, -1), wanted.movedim(how.axis, -1)
    if not a.numel():
        return vector_damages(a.double(), b.double(), how)
    some = max(1, AT_ONCE // a.shape[-1])  # vectors
    rows = zip(*(one.reshape(-1, one.shape[-1]).split(some) for one in (a, b)), strict=True)
    return torch.cat([vector_damages(one.double(), other.double(), how) for one, other in rows]).reshape(a.shape[:-1])


def number_damages(a: Tensor, b: Tensor, how: OutputMeasure) -> Tensor:
    """Damage of numbers, by binary."""
    return -torch.expm1(-bernoulli_divergence(*(logits(one) if how.probabilities else one for one in (a, b))))


def vector_damages(a: Tensor, b: Tensor, how: OutputMeasure) -> Tensor:
    """Damage of vectors along the last axis, by kl or cosine."""
    if how.measure == KL:
        log_a, log_b = ((one.clamp(min=TOUCHING).log() if how.probabilities else one).log_softmax(-1) for one in (a, b))
        return -torch.expm1(-(log_b.exp() * (log_b - log_a)).sum(-1).clamp(min=0))
    lengths = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    both_zero = (lengths[0] == 0) & (lengths[1] == 0)
    gap = a / lengths[0].clamp(min=1e-300) - b / lengths[1].clamp(min=1e-300)
    return torch.where(both_zero[..., 0], 0.0, gap.square().sum(-1) / 2)


def relative_errors(a: Tensor, b: Tensor, how: OutputMeasure) -> Tensor:
    """Mean squared error of every sample, relative to the variance."""
    if not a.dim():
        a, b = a.reshape(1), b.reshape(1)
    if not a.numel():
        return a.double().reshape(-1)
    variance, axis = torch.tensor(how.variance, dtype=torch.float64), how.axis % a.dim()
    own = len(variance) if axis else 1  # numbers that have a variance each
    a, b = ((one.movedim(axis, -1) if own > 1 else one).reshape(len(one), -1, own) for one in (a, b))
    errors = torch.cat(
        [
            squared_errors(one, other)
            for one, other in zip(*(one.split(samples_at_once(a)) for one in (a, b)), strict=True)
        ]
    )  # (samples, own), summed over the sample's other numbers
    return errors.div_(variance if own > 1 or len(variance) == 1 else variance[:, None]).sum(1) / a[0].numel()


def samples_at_once(a: Tensor) -> int:
    """Samples (samples, positions, own) that are compared at once."""
    return max(1, AT_ONCE // a[0].numel())


def squared_errors(a: Tensor, b: Tensor) -> Tensor:
    """Sums of squared errors over positions: (samples, own) of (samples, positions, own)."""
    total = torch.zeros(len(a), a.shape[2], dtype=torch.float64)
    for one, other in zip(*(one.split(max(1, AT_ONCE // (len(a) * a.shape[2])), 1) for one in (a, b)), strict=True):
        total += (one.double() - other.double()).square_().sum(1)
    return total


def logits(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(TOUCHING, 1 - TOUCHING).logit()


def bernoulli_divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(sigmoid b || sigmoid a) of every number."""
    log = torch.nn.functional.logsigmoid
    found = b.sigmoid() * (log(b) - log(a)) + (-b).sigmoid() * (log(-b) - log(-a))
    return found.clamp(min=0) if found.dim() else found.reshape(1).clamp(min=0)


def all_finite(said: Tensor) -> bool:
    """Whether all numbers are finite. The sum is tried first: it takes a tenth of the time, but it may overflow."""
    return bool(torch.isfinite(said.sum())) or bool(torch.isfinite(said).all())


# Choose a measure from an output's values alone

OFFSET = 0.9  # if the mean vector has more than this share of the mean square, cosines of these vectors say nothing


def feature_axis(tensor: Tensor) -> int:
    """Axis of the channels of images, else the last axis."""
    return 1 if tensor.dim() > 3 else -1


def measure_from_values(name: str, said: Sequence[Tensor]) -> OutputMeasure:
    """Choose a measure for an output of which only values are known."""
    first = said[0]
    axis = feature_axis(first)
    if first.dim() < 2 or first.shape[axis] == 1:
        return with_variance(OutputMeasure(name, R2, axis, "single numbers"), said)
    for one in dict.fromkeys((axis, -1)):
        if are_probabilities(said, one):
            return OutputMeasure(name, KL, one, "probabilities that add up to 1", probabilities=True)
        if are_log_probabilities(said, one):
            return OutputMeasure(name, KL, one, "logarithms of probabilities that add up to 1")
    if name.rpartition(".")[2] == "logits":
        return OutputMeasure(name, KL, axis, "it is called logits")
    known = column_statistics(said, axis)
    square = known.mean.square()
    if known.vectors > 1 and len(square) > 1 and float(square.sum()) > OFFSET * float((square + known.variance).sum()):
        return with_variance(OutputMeasure(name, R2, axis, "vectors that all point nearly the same way"), said)
    return OutputMeasure(name, COSINE, axis, "vectors")


class ColumnStatistics(NamedTuple):
    """Of vectors, number by number; in double precision."""

    vectors: int
    mean: Tensor
    variance: Tensor


def column_statistics(said: Sequence[Tensor], axis: int) -> ColumnStatistics:
    """Of all vectors along an axis; of single numbers if there are no vectors, or if their lengths differ between batches. Parts are merged
    (Chan, Golub, LeVeque 1983, doi 10.1080/00031305.1983.10483115), because the outputs of a language model are larger than its weights."""
    lengths = {one.shape[axis] if one.dim() > 1 else 1 for one in said}
    width = lengths.pop() if len(lengths) == 1 else 1
    count, mean, squares = 0, torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for one in said:
        rows = (one.movedim(axis, -1) if width > 1 else one).reshape(-1, width)
        for some in rows.split(max(1, AT_ONCE // max(width, 1))):
            part = some.double()
            added = len(part)
            if not added:
                continue
            off = part.mean(0) - mean
            squares += part.var(0, correction=0) * added + off.square() * (count * added / (count + added))
            mean += off * (added / (count + added))
            count += added
    return ColumnStatistics(count, mean, squares / max(count, 1))


def are_probabilities(said: Sequence[Tensor], axis: int) -> bool:
    return all(bool((one >= 0).all()) and bool(((one.double().sum(axis) - 1).abs() < 1e-3).all()) for one in said)


def are_log_probabilities(said: Sequence[Tensor], axis: int) -> bool:
    return all(bool((one <= 0).all()) and bool((one.double().logsumexp(axis).abs() < 1e-3).all()) for one in said)


def with_variance(how: OutputMeasure, said: Sequence[Tensor]) -> OutputMeasure:
    """Add the variances of an output to its measure: per number if there are few, else their mean. Constant numbers use
    their mean square instead."""
    _, mean, variance = column_statistics(said, how.axis)
    square = mean.square() + variance
    constant = (ROUNDING * torch.finfo(said[0].dtype).eps) ** 2
    known = torch.where(variance > constant * square, variance, square)
    known = torch.where(known > 0, known, 1.0)
    told = known.tolist() if len(known) <= OWN else [float(known.mean())]
    return OutputMeasure(how.name, how.measure, how.axis, how.why, how.probabilities, tuple(told))
