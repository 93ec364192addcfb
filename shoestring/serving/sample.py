"""A sample: what one request asks the model, and what the model says to it. No batch axis on either side.

A job's `answer` is a generator: it makes a sample of a request, is handed the model's output for it, and makes the answer.

    def answer(text: str):
        output = yield tokenizer(text, return_tensors="pt")     # a sample; shoestring computes it in a batch with others
        return {"label": NAMES[output.logits.argmax()]}

It may yield several times (one after the other), or a list of samples (computed together). A sample is a mapping of
tensors by the names of the forward's arguments, or a tuple of tensors, or one tensor. A first axis of size 1, as tokenizers
make it, is taken for a batch of one and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Tensors = Mapping[str, Tensor]  # by name, without a batch axis


@dataclass(frozen=True)
class Sample:
    """The tensors of one request, and how many of the model's positions they take."""

    inputs: Tensors
    length: int  # size of the axis that varies; 1 where none does

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((name, tuple(one.shape)) for name, one in self.inputs.items())


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives, found by calling it on samples of the job."""

    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    container: type[Any]  # of the batch that the job's forward takes: dict, tuple, or Tensor

    @property
    def varies(self) -> bool:
        """Whether samples may differ in length."""
        return any(-1 in one.shape for one in self.inputs)


@dataclass(frozen=True)
class TensorForm:
    """Name, dtype and shape of an input or output, without the batch axis; -1: any size."""

    name: str
    dtype: str  # as torch writes it, such as "float32"
    shape: tuple[int, ...]


Answers = Sequence[Tensors]  # one for each sample, in their order
