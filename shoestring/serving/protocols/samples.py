"""From what a request or a job's `answer` gives to a sample of a model, by its signature; and what `answer` is handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.model.named_outputs import NamedOutputs
from shoestring.serving.sample import Sample, Signature, TensorForm, Tensors

ALONE = "output"  # name of the output of a model that gives one tensor


class EmptySample(ValueError):
    """A sample without a position: of an empty text, or of no audio."""


def as_output(tensors: Tensors) -> Any:
    """One sample's outputs as a job's `answer` gets them: a tensor if the model gives one, else by name."""
    return tensors[ALONE] if set(tensors) == {ALONE} else NamedOutputs(tensors)


def length_of(inputs: Tensors, kinds: Sequence[TensorForm]) -> int:
    """The size of the axis that varies; of several, the largest; 1 where none does."""
    sizes = [inputs[one.name].shape[one.shape.index(-1)] for one in kinds if -1 in one.shape]
    return max(sizes, default=1)


def fits(shape: Sequence[int], kind: TensorForm) -> bool:
    return len(shape) == len(kind.shape) and all(
        size > 0 and wanted in (-1, size) for size, wanted in zip(shape, kind.shape, strict=True)
    )


def sample_of(value: Any, signature: Signature) -> Sample:
    """A sample of what `answer` yields. A first axis of size 1 that the input does not have is dropped."""
    names = [one.name for one in signature.inputs]
    if isinstance(value, Tensor):
        value = (value,)
    if isinstance(value, (tuple, list)) and len(value) == len(names):
        value = dict(zip(names, value, strict=True))
    if not isinstance(value, Mapping) or set(names) - set(value):
        got = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise Mistake(f"answer yielded {got}, and the model takes {', '.join(names)}: yield a tensor for each of them")
    inputs = {one.name: as_input(value[one.name], one) for one in signature.inputs}
    return Sample(inputs, length_of(inputs, signature.inputs))


def as_input(value: Any, kind: TensorForm) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise Mistake(f"answer yielded a {type(value).__name__} as {kind.name}, which is no tensor") from None
    if tensor.ndim == len(kind.shape) + 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim == len(kind.shape) and not tensor.numel():
        raise EmptySample(f"{kind.name} is empty: a sample needs at least one position")
    if not fits(tensor.shape, kind):
        wanted = ["any" if size < 0 else size for size in kind.shape]
        raise Mistake(f"answer yielded {kind.name} of the shape {list(tensor.shape)}, and the model takes {wanted}")
    dtype = getattr(torch, kind.dtype)
    if tensor.dtype != dtype and not torch.can_cast(tensor.dtype, dtype):
        raise Mistake(f"answer yielded {kind.name} as {tensor.dtype}, and the model takes {dtype}")
    return tensor.to(dtype)
