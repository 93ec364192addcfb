"""From samples to the batch that a job's forward takes, and back from what a job's `answer` yields to a sample.

    sample 0   input_ids [7 3 9]        batch   input_ids      [[7 3 9 0 0]     attention_mask  [[1 1 1 0 0]
    sample 1   input_ids [4 4 8 1 2]                            [4 4 8 1 2]]                     [1 1 1 1 1]]

Samples are padded at their end. Which number pads an input is tried (engines/padding.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shoestring.compression.onnx.interface import named_tensors, replace_tensors
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.serving.sample import Sample, TensorForm


@dataclass(frozen=True)
class InputForm:
    """An input of the model. Shapes and axes are without the batch axis."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # -1 along the axis that varies
    pad: float = 0  # what fills the end of shorter samples

    @property
    def axis(self) -> int | None:
        """The axis that varies."""
        return self.shape.index(-1) if -1 in self.shape else None

    @property
    def kind(self) -> TensorForm:
        return TensorForm(self.name, str(self.dtype).removeprefix("torch."), self.shape)


@dataclass(frozen=True, eq=False)
class BatchInputs:
    """How samples make a batch: the inputs, in the order of the template's tensors."""

    forms: tuple[InputForm, ...]
    template: Batch  # a batch of the job without labels; its tensors are replaced
    ones: str = ""  # a mask that samples lack and the model takes: 1 for every position of a sample

    @property
    def sample_inputs(self) -> tuple[InputForm, ...]:
        """The inputs that a sample brings."""
        return tuple(form for form in self.forms if form.name != self.ones)

    def sample(self, value: Any) -> Sample:
        """A sample of what an `answer` yields: a mapping of tensors, a tuple of tensors or a tensor."""
        found = self.by_name(value)
        tensors = {form.name: without_batch_axis(found[form.name], form) for form in self.sample_inputs}
        sizes = {form.name: tensors[form.name].shape[form.axis] for form in self.sample_inputs if form.axis is not None}
        return Sample(tensors, max(sizes.values(), default=1))

    def by_name(self, value: Any) -> Mapping[str, Tensor]:
        """The tensors of a value by the names of the inputs."""
        wanted = [form.name for form in self.sample_inputs]
        found = (value,) if isinstance(value, Tensor) else value
        if isinstance(found, (tuple, list)) and len(found) == len(wanted):
            found = dict(zip(wanted, found, strict=True))
        if not isinstance(found, Mapping) or set(wanted) - set(found):
            got = ", ".join(map(str, found)) if isinstance(found, Mapping) else ""
            raise Mistake(
                f"the model takes {', '.join(wanted)}, and got {got or f'a {type(value).__name__}'}: give a tensor for each "
                f"of its inputs"
            )
        return found

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """Samples of one or several lengths as a batch."""
        return replace_tensors(self.template, [self.batch_tensor(form, samples) for form in self.forms])

    def batch_tensor(self, form: InputForm, samples: Sequence[Sample]) -> Tensor:
        if form.name == self.ones:
            return pad_and_stack([torch.ones(one.length, dtype=form.dtype) for one in samples], form)
        return pad_and_stack([one.inputs[form.name] for one in samples], form)

    def crop(self, sample: Sample, length: int) -> Sample:
        """The first positions of a sample."""
        kept = {
            form.name: sample.inputs[form.name].narrow(
                form.axis, 0, min(length, sample.inputs[form.name].shape[form.axis])
            )
            if form.axis is not None
            else sample.inputs[form.name]
            for form in self.sample_inputs
        }
        return Sample(kept, min(length, sample.length))

    def with_pads(self, pads: Mapping[str, float]) -> BatchInputs:
        return replace(self, forms=tuple(replace(form, pad=pads.get(form.name, form.pad)) for form in self.forms))


def pad_and_stack(tensors: Sequence[Tensor], form: InputForm) -> Tensor:
    """
    >>> pad_and_stack([torch.tensor([7, 3]), torch.tensor([4])], InputForm("ids", torch.int64, (-1,), pad=9)).tolist()
    [[7, 3], [4, 9]]
    """
    if form.axis is None or len({one.shape for one in tensors}) == 1:
        return torch.stack(list(tensors))
    if form.axis == 0:
        return pad_sequence(list(tensors), batch_first=True, padding_value=form.pad)
    turned: Tensor = pad_sequence(
        [one.movedim(form.axis, 0) for one in tensors], batch_first=True, padding_value=form.pad
    )
    return turned.movedim(1, form.axis + 1).contiguous()


def without_batch_axis(value: Any, form: InputForm) -> Tensor:
    """A tensor in an input's dtype; a first axis of size 1 that the input does not have is dropped. Raises Mistake if its
    shape or dtype does not fit."""
    if not isinstance(value, Tensor):
        raise Mistake(f"{form.name} must be a tensor, and is a {type(value).__name__}")
    tensor: Tensor = value
    if tensor.ndim == len(form.shape) + 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    fits = tensor.ndim == len(form.shape) and all(
        wanted in (-1, size) for wanted, size in zip(form.shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = [size if size >= 0 else "any" for size in form.shape]
        raise Mistake(f"{form.name} has the shape {list(tensor.shape)}, and the model takes {wanted}")
    if form.axis is not None and not tensor.shape[form.axis]:
        raise Mistake(f"{form.name} is empty: a sample needs at least one position")
    if tensor.dtype != form.dtype:
        if not torch.can_cast(tensor.dtype, form.dtype):
            raise Mistake(f"{form.name} has the dtype {tensor.dtype}, and the model takes {form.dtype}")
        tensor = tensor.to(form.dtype)
    return tensor


def batch_template(batch: Batch) -> Batch:
    """A batch as a template: the same structure with tensors that hold nothing."""
    return replace_tensors(batch, [one.new_empty(0) for _, one in named_tensors(batch)])
