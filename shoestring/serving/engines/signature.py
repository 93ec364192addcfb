"""What a job's model takes and gives, found by calling it on batches of the job, or on what its `answer` yields.

Inputs are the tensors of a batch that the outputs depend on: labels are none, nor is what the forward never reads. An axis
varies if the samples differ there, or else if the model also takes less of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.onnx.interface import (
    Forward,
    all_outputs,
    interface_of,
    loss_names,
    named_tensors,
    outputs_of,
    without_keys,
)
from shoestring.core.batch import Batch, map_leaves
from shoestring.core.batch import samples as count_of
from shoestring.core.errors import Mistake
from shoestring.serving.engines.inputs import BatchInputs, InputForm, batch_template
from shoestring.serving.engines.outputs import Compute, OutputForm, output_forms
from shoestring.serving.sample import Sample, Signature

KEPT = 16  # most samples that are kept of the job's batches


@dataclass(frozen=True, eq=False)
class ModelInterface:
    """How samples go into a model, and answers come out."""

    inputs: BatchInputs
    outputs: tuple[OutputForm, ...]
    samples: tuple[Sample, ...]  # of the job; the last one is the longest

    @property
    def signature(self) -> Signature:
        kinds = tuple(form.kind for form in self.inputs.sample_inputs)
        return Signature(kinds, tuple(form.kind for form in self.outputs), container_of(self.inputs.template))

    @property
    def varies(self) -> bool:
        return any(form.axis is not None for form in self.inputs.sample_inputs)


def find_interface(
    model: nn.Module, forward: Forward, *, batches: Sequence[Batch] = (), values: Sequence[Any] = ()
) -> ModelInterface:
    """Find the interface of a model in eval mode. `values`: what the job's `answer` yields, if it has one; else `batches`
    of the job."""
    with torch.inference_mode():
        if values:
            inputs, samples = from_values(values)
        elif batches:
            inputs, samples = from_batches(model, forward, batches)
        else:
            raise Mistake("a model's inputs are found with batches of its job, or samples of its answer: give some")
        compute = torch_compute(model, forward)
        inputs = with_varying_axes(compute, inputs, samples)
        samples = [inputs.sample(one.inputs) for one in samples]
        samples.sort(key=lambda one: one.length)
        lengths = several_lengths(compute, inputs, samples)
        return ModelInterface(inputs, output_forms(compute, inputs, lengths), tuple(samples))


def torch_compute(model: nn.Module, forward: Forward) -> Compute:
    """The job's call of the model, as outputs by name."""

    def compute(batch: Batch) -> Mapping[str, Tensor]:
        with ordinary_layers():
            return outputs_of(forward(model, batch))

    return compute


@contextmanager
def ordinary_layers() -> Iterator[None]:
    """While inside, torch's transformer layers take no fast path of their own: it goes through nested tensors, and gives
    zeros where a mask hides a position instead of what the layers compute there."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def container_of(batch: Batch) -> type[Any]:
    if isinstance(batch, Tensor):
        return Tensor
    return dict if isinstance(batch, Mapping) else tuple


# Inputs


def from_values(values: Sequence[Any]) -> tuple[BatchInputs, list[Sample]]:
    """Inputs from what an `answer` yields: without a first axis of size 1 that all its tensors have."""
    first = [dict(named_tensors(one)) for one in values]
    if not first[0] or any(one.keys() != first[0].keys() for one in first):
        raise Mistake(
            "the job's answer must yield a mapping of tensors, a tuple of tensors or a tensor, with the same names each time"
        )
    batched = all(tensor.ndim and tensor.shape[0] == 1 for one in first for tensor in one.values())
    samples = [Sample({name: tensor[0] if batched else tensor for name, tensor in one.items()}, 1) for one in first]
    template = values[0] if not isinstance(values[0], Mapping) else {name: values[0][name] for name in values[0]}
    return BatchInputs(forms_of(samples), batch_template(template)), samples


def from_batches(model: nn.Module, forward: Forward, batches: Sequence[Batch]) -> tuple[BatchInputs, list[Sample]]:
    """Inputs from the tensors of batches that the outputs depend on."""
    interface = interface_of(model, forward, batches[0])
    unread = unread_leaves(model, forward, batches[0])

    def model_inputs(batch: Batch) -> Batch:
        return without_leaves(without_keys(batch, interface.labels) if interface.labels else batch, unread)

    template = model_inputs(batches[0])
    names = [
        name
        for name, (place, _) in zip(interface.names, named_tensors(interface.part(batches[0])), strict=True)
        if place not in unread
    ]
    rows = (row for batch in batches for row in rows_of_batch(model_inputs(batch), names))
    samples = [Sample(row, 1) for row, _ in zip(rows, range(KEPT), strict=False)]
    return BatchInputs(forms_of(samples), batch_template(template)), samples


def rows_of_batch(batch: Batch, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    tensors = [one for _, one in named_tensors(batch)]
    count = count_of(batch)
    for row in range(count):
        yield {
            name: one[row if one.shape[0] == count else 0] if one.ndim else one
            for name, one in zip(names, tensors, strict=True)
        }


class Untouchable:
    """Stands for a tensor that should never be read: whatever is done with it fails, but handing it on."""

    def __getattribute__(self, name: str) -> Any:
        raise Touched(name)


class Touched(Exception):
    """Somebody read an Untouchable."""


def unread_leaves(model: nn.Module, forward: Forward, batch: Batch) -> frozenset[str]:
    """Places in a tuple's batch whose tensors are labels: never read, or read by a loss alone."""
    if isinstance(batch, (Mapping, Tensor)):
        return frozenset()
    whole = all_outputs(forward(model, batch))
    wanted = {name: one for name, one in whole.items() if name not in loss_names(whole)}
    found: frozenset[str] = frozenset()
    places = [name for name, _ in named_tensors(batch)]
    for place in places:
        for instead in (Untouchable(), None):
            try:
                rest = all_outputs(forward(model, without_leaves(batch, found | {place}, instead)))
            except Exception:  # of the job's own code: it needs it
                continue
            same = rest.keys() == wanted.keys() and all(torch.equal(one, rest[name]) for name, one in wanted.items())
            if same and (instead is not None or len(wanted) < len(whole)):
                found |= {place}
                break
    if len(found) == len(places):
        raise Mistake("the job's forward reads no tensor of its batch: nothing of a request could change its answer")
    return found


def without_leaves(batch: Batch, places: frozenset[str], instead: Any = None) -> Batch:
    """A batch with something instead of these tensors."""
    if not places:
        return batch
    taken = {id(one) for name, one in named_tensors(batch) if name in places}
    return map_leaves(lambda leaf: instead if id(leaf) in taken else leaf, batch)


def forms_of(samples: Sequence[Sample]) -> tuple[InputForm, ...]:
    """Forms of inputs; an axis varies if the samples differ there."""
    found = []
    for name, tensor in samples[0].inputs.items():
        shapes = {tuple(one.inputs[name].shape) for one in samples}
        if len({len(shape) for shape in shapes}) > 1:
            raise Mistake(
                f"{name} has {sorted(map(len, shapes))} axes in different samples: it must always have as many"
            )
        sizes = tuple(size.pop() if len(size := set(one)) == 1 else -1 for one in zip(*shapes, strict=True))
        if sizes.count(-1) > 1:
            raise Mistake(
                f"{name} differs in {sizes.count(-1)} axes between samples, and one may vary: bring the others to one size"
            )
        found.append(InputForm(name, tensor.dtype, sizes))
    return tuple(found)


# Axes


def with_varying_axes(compute: Compute, inputs: BatchInputs, samples: Sequence[Sample]) -> BatchInputs:
    """The inputs with an axis that varies, if samples differ, or the model takes shorter ones."""
    if any(form.axis is not None for form in inputs.forms):
        return inputs
    sample = inputs.sample(samples[0].inputs)
    for axis in (0, 1):
        opened = with_axis(inputs, axis)
        if opened is not None and all(takes(compute, opened, opened.sample(sample.inputs), share) for share in (0, 1)):
            return opened
    return inputs


def with_axis(inputs: BatchInputs, axis: int) -> BatchInputs | None:
    """The inputs with this axis open in all that have the same size there as the first; None if there is nothing to open.
    Images keep their size."""
    sizes = [form.shape[axis] for form in inputs.forms if axis < len(form.shape) < 3]
    if not sizes or sizes[0] < 3:
        return None
    return replace(
        inputs,
        forms=tuple(
            replace(form, shape=(*form.shape[:axis], -1, *form.shape[axis + 1 :]))
            if axis < len(form.shape) < 3 and form.shape[axis] == sizes[0]
            else form
            for form in inputs.forms
        ),
    )


def takes(compute: Compute, inputs: BatchInputs, sample: Sample, halved: int) -> bool:
    """Whether the model takes a sample that is shorter by one, or half as long."""
    try:
        compute(inputs.batch([inputs.crop(sample, sample.length // 2 if halved else sample.length - 1)]))
    except Exception:  # the model's own: it wants one size
        return False
    return True


def several_lengths(compute: Compute, inputs: BatchInputs, samples: Sequence[Sample]) -> list[Sample]:
    """Samples of a few lengths: the longest cropped to some, and itself; the longest alone if lengths do not vary."""
    longest = samples[-1]
    if all(form.axis is None for form in inputs.sample_inputs):
        return [longest]
    least = shortest(compute, inputs, longest)
    lengths = sorted({least, *(longest.length - (longest.length - least) // part for part in (2, 3)), longest.length})
    return [inputs.crop(longest, length) for length in lengths]


def shortest(compute: Compute, inputs: BatchInputs, sample: Sample) -> int:
    """The first length that the model takes, of 1, 2, 4, 8, ..."""
    length = 1
    while length < sample.length and not gives(compute, inputs, inputs.crop(sample, length)):
        length *= 2
    return min(length, sample.length)


def gives(compute: Compute, inputs: BatchInputs, sample: Sample) -> bool:
    try:
        return all(one.numel() for one in compute(inputs.batch([sample])).values())
    except Exception:  # the model's own: too short for a convolution
        return False
