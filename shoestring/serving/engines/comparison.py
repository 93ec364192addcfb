"""Samples to compare ways of computing on, and how far answers are apart.

A way of computing samples together is believed after it gave, for every batch below, what the model says to each sample
alone: lengths mixed and in other orders, the shortest beside the longest, equal lengths, one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.serving.engines.outputs import Compute, answers_alone
from shoestring.serving.engines.signature import ModelInterface, shortest
from shoestring.serving.sample import Answers, Sample, Tensors

SMALL = (
    48  # longest of the samples that are compared in most batches, unless the model takes none that are much shorter
)
# Largest difference that is rounding, relative to the output's largest number: sums are taken in another order
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class References:
    """Samples, what the model says to each alone, and the batches to compare."""

    samples: tuple[Sample, ...]
    alone: Answers
    batches: tuple[tuple[int, ...], ...]  # numbers of samples

    def difference(self, answers: Callable[[Sequence[Sample]], Answers], numbers: Sequence[int]) -> float:
        """How far the answers to one batch are from the model alone."""
        found = answers([self.samples[number] for number in numbers])
        return max(difference(self.alone[number], one, self.alone) for number, one in zip(numbers, found, strict=True))

    def largest_difference(self, answers: Callable[[Sequence[Sample]], Answers]) -> float:
        return max(self.difference(answers, numbers) for numbers in self.batches)


def references(compute: Compute, interface: ModelInterface) -> References:
    samples = compared_samples(compute, interface)
    return References(
        tuple(samples),
        answers_alone(compute, interface.inputs, interface.outputs, samples),
        tuple(compared_batches(samples)),
    )


def compared_samples(compute: Compute, interface: ModelInterface) -> list[Sample]:
    """Samples of the job; if lengths vary, cropped to several: two are of equal length, the last is the longest there is."""
    found = list(interface.samples)
    if not interface.varies:
        return (found * 4)[:4]
    crop = interface.inputs.crop
    least = shortest(compute, interface.inputs, found[-1])
    most = max(least, min(max(SMALL, 8 * least), found[-1].length - 1))
    lengths = [least, *(least + (most - least) * part // 8 for part in (1, 3, 3, 5)), most]
    longest_first = found[::-1]
    small = [crop(fitting(longest_first, number, length), length) for number, length in enumerate(lengths)]
    return [*small[:-1], other_end(small[-1], interface), found[-1]]


def other_end(sample: Sample, interface: ModelInterface) -> Sample:
    """A sample whose masks and kinds of tokens, which hold only 0 and 1, have the other one at the end of it: so padding in
    a sample, which a tokenizer may make, is compared too."""
    flipped = dict(sample.inputs)
    for form in interface.inputs.sample_inputs:
        values = sample.inputs[form.name]
        if form.axis is not None and holds_bits(values):
            start = values.shape[form.axis] - values.shape[form.axis] // 3
            changed = flipped[form.name] = values.clone()
            end = changed.narrow(form.axis, start, values.shape[form.axis] - start)
            end.copy_((end == 0).to(end.dtype))
    return Sample(flipped, sample.length)


def holds_bits(values: Tensor) -> bool:
    """Whether these are whole numbers, and only 0 and 1."""
    return not values.is_floating_point() and not values.is_complex() and bool(((values == 0) | (values == 1)).all())


def fitting(samples: Sequence[Sample], number: int, length: int) -> Sample:
    """The sample of a number, among those that are long enough."""
    enough = [one for one in samples if one.length >= length]
    return enough[number % len(enough)]


def compared_batches(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """
    >>> compared_batches([Sample({}, length) for length in (1, 5, 9, 9, 12, 40)])
    [(4, 1, 0, 2, 3), (0, 1, 2, 3, 4), (2, 3), (0, 5, 1), (5,)]
    """
    last = len(samples) - 1
    small = list(range(last)) or [0]
    mixed = small[-1:] + small[1:2] + small[:1] + small[2:-1]
    equal = [number for number in small if [one.length for one in samples].count(samples[number].length) > 1]
    return [
        tuple(dict.fromkeys(one))
        for one in (
            mixed,
            small,
            [number for number in equal if samples[number].length == samples[equal[0]].length],
            [0, last, min(1, last)],
            [last],
        )
        if one
    ]


def difference(wanted: Tensors, found: Tensors, all_wanted: Sequence[Tensors] = ()) -> float:
    """Relative difference of the output that differs most; infinity for other shapes, whole numbers or other places that
    are not finite.

    >>> difference({"y": torch.tensor([1.0, 2.0])}, {"y": torch.tensor([1.0, 2.5])})
    0.25
    """
    if wanted.keys() != found.keys():
        return math.inf
    return max(
        (apart(one, found[name], [each[name] for each in all_wanted]) for name, one in wanted.items()), default=0.0
    )


def apart(wanted: Tensor, found: Tensor, others: Sequence[Tensor]) -> float:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return math.inf
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(wanted, found) else math.inf
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(
        wanted[~finite].nan_to_num(), found[~finite].nan_to_num()
    ):
        return math.inf
    if not finite.any():
        return 0.0
    return float((wanted - found)[finite].abs().max()) / largest([wanted, *others])


def largest(tensors: Sequence[Tensor]) -> float:
    """The largest finite number; 1 if there is none but zeros."""
    return (
        max((float(kept.abs().max()) for one in tensors if (kept := one[one.isfinite()]).numel()), default=0.0) or 1.0
    )
