"""From a batch's outputs to one answer for each sample, cropped to its own positions.

Which axis of an output counts samples, and which ones grow with a sample's length, is found by calling the model on one
sample, on two, and on samples of several lengths; no name is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.serving.engines.inputs import BatchInputs
from shoestring.serving.engines.lengths import LengthRule, length_rule
from shoestring.serving.sample import Answers, Sample, TensorForm, Tensors

Compute = Callable[[Batch], Mapping[str, Tensor]]  # a batch's outputs by name


@dataclass(frozen=True)
class OutputForm:
    """An output of the model. `rows` is an axis of the batch's output, `axes` are axes without it."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of one sample's; -1 along axes that vary
    rows: int | None  # the axis of samples; None: all samples share the output
    axes: tuple[tuple[int, LengthRule | None], ...] = ()  # those that vary; no rule: any size

    @property
    def kind(self) -> TensorForm:
        return TensorForm(self.name, self.dtype, self.shape)

    @property
    def follows(self) -> bool:
        """Whether its sizes are known from a sample's length."""
        return all(rule is not None for _, rule in self.axes)

    def of_row(self, output: Tensor, row: int, length: int) -> Tensor:
        """One sample's part of a batch's output."""
        found = output if self.rows is None else output.select(self.rows, row)
        for axis, rule in self.axes:
            if rule is not None:
                found = found.narrow(axis, 0, rule(length))
        return found


def split(outputs: Mapping[str, Tensor], forms: Sequence[OutputForm], samples: Sequence[Sample]) -> list[Tensors]:
    """One answer for each sample of a batch."""
    return [
        {form.name: form.of_row(outputs[form.name], row, sample.length) for form in forms}
        for row, sample in enumerate(samples)
    ]


def output_forms(compute: Compute, inputs: BatchInputs, samples: Sequence[Sample]) -> tuple[OutputForm, ...]:
    """The outputs' forms. The samples have several lengths, if lengths vary; the last one is the longest."""
    seen = {one.length: compute(inputs.batch([one])) for one in samples}
    longest = samples[-1]
    alone, twice = seen[longest.length], two_of(compute, inputs, longest)
    found = []
    for name, output in alone.items():
        rows = row_axis(tuple(output.shape), tuple(twice[name].shape) if name in twice else None)
        shapes = {length: without(tuple(one[name].shape), rows) for length, one in seen.items() if name in one}
        found.append(output_form(name, output, rows, shapes, sizes_at(compute, inputs, longest, name, rows)))
    return tuple(found)


def two_of(compute: Compute, inputs: BatchInputs, sample: Sample) -> Mapping[str, Tensor]:
    """Outputs for the same sample twice; none if the model takes no batch of two."""
    try:
        return compute(inputs.batch([sample, sample]))
    except Exception:  # the model's own
        return {}


def row_axis(one: tuple[int, ...], two: tuple[int, ...] | None) -> int | None:
    """
    >>> row_axis((7, 1, 16), (7, 2, 16)), row_axis((1, 4), None), row_axis((), ())
    (1, 0, None)
    """
    if two is None:
        return 0 if one and one[0] == 1 else None
    return next((axis for axis, pair in enumerate(zip(one, two, strict=False)) if pair == (1, 2)), None)


def without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None else shape[:axis] + shape[axis + 1 :]


def output_form(
    name: str,
    output: Tensor,
    rows: int | None,
    shapes: Mapping[int, tuple[int, ...]],
    size_at: Callable[[int, int], int],
) -> OutputForm:
    """A form from the shapes at several lengths; `size_at(length, axis)` asks for others."""
    shape = without(tuple(output.shape), rows)
    varying = [axis for axis in range(len(shape)) if len({one[axis] for one in shapes.values()}) > 1]
    axes = tuple(
        (axis, length_rule(lambda n, a=axis: size_at(n, a), {n: one[axis] for n, one in shapes.items()}, max(shapes)))  # type: ignore[misc]
        for axis in varying
    )
    dtype = str(output.dtype).removeprefix("torch.")
    return OutputForm(
        name, dtype, tuple(-1 if axis in varying else size for axis, size in enumerate(shape)), rows, axes
    )


def sizes_at(
    compute: Compute, inputs: BatchInputs, longest: Sample, name: str, rows: int | None
) -> Callable[[int, int], int]:
    """Asks for the size of an output's axis at a length."""

    def size(length: int, axis: int) -> int:
        output = compute(inputs.batch([inputs.crop(longest, length)]))[name]
        return without(tuple(output.shape), rows)[axis]

    return size


def answers_alone(
    compute: Compute, inputs: BatchInputs, forms: Sequence[OutputForm], samples: Sequence[Sample]
) -> Answers:
    """Every sample in a batch of its own: what all other ways are compared with."""
    whole = [OutputForm(form.name, form.dtype, form.shape, form.rows) for form in forms]
    return [split(compute(inputs.batch([one])), whole, [one])[0] for one in samples]
