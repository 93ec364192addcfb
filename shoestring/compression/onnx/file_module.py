"""An ONNX file as a module: called as the model that it was exported from, and computed by onnxruntime."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor, uses_external_data
from torch import Tensor, nn

from shoestring.compression.onnx.check import session
from shoestring.compression.onnx.trace import LARGEST, reason
from shoestring.core.errors import Mistake
from shoestring.core.files.regular import regular
from shoestring.core.model.named_outputs import NamedOutputs

MOST_ROWS = 1 << 20  # samples that a file may fix


@contextmanager
def reading_onnx(path: Path) -> Iterator[None]:
    """While inside, impossible content is reported as the file's fault: it may come from anybody, and onnx and
    onnxruntime raise exceptions of many types."""
    try:
        check_size(path)
        yield
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(f"{path} can't be read as an ONNX file: {reason(error)}") from error


def check_size(path: Path) -> None:
    """Refuse what is no file, and a file larger than any that we write: a sparse one can claim any size."""
    with open(path, "rb", opener=regular) as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST:
            raise Mistake(f"{path} takes {size:,} bytes, and files up to {LARGEST:,} can be compressed")


class OnnxCall(nn.Module, ABC):
    """A module with the inputs and outputs of an ONNX graph. Positional arguments are its inputs in order, and give one
    tensor or a tuple; keyword arguments are inputs by name (others, such as labels, are ignored), and give outputs by
    name.

    If all inputs have the same fixed number of samples, other batches are computed in pieces of that number.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        super().__init__()
        constants = {one.name for one in graph.initializer}
        inputs = [one for one in graph.input if one.name not in constants]
        self.kinds = {
            one.name: helper.tensor_dtype_to_np_dtype(one.type.tensor_type.elem_type) for one in inputs
        }  # dtypes by name
        self.outputs = tuple(one.name for one in graph.output)
        fixed = {one.type.tensor_type.shape.dim[0].dim_value if one.type.tensor_type.shape.dim else 0 for one in inputs}
        self.rows = fixed.pop() if len(fixed) == 1 else 0  # number of samples that the file fixes; 0: any
        if not 0 <= self.rows <= MOST_ROWS:
            raise Mistake(f"the ONNX file fixes {self.rows} samples, and up to {MOST_ROWS} can be computed at once")

    def forward(self, *args: Tensor, **named: Tensor) -> Any:
        feed = self.feed(args, named)
        found = self.in_pieces(feed) if self.rows else self.compute(feed)
        if named:
            return NamedOutputs(found)
        return tuple(found.values()) if len(found) > 1 else next(iter(found.values()))

    def feed(self, args: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs by name, in the file's dtypes."""
        given = {**dict(zip(self.kinds, args, strict=False)), **named}
        missing = [name for name in self.kinds if not isinstance(given.get(name), Tensor)]
        if missing or len(args) > len(self.kinds):
            raise Mistake(
                f"the ONNX file has the inputs {', '.join(self.kinds)}, and the job calls it with "
                f"{len(args)} tensors{f' and {chr(44).join(named)}' if named else ''}: give the Job a forward such as "
                f"lambda model, batch: model({', '.join(f'{name}=...' for name in self.kinds)})"
            )
        return {name: as_dtype(name, given[name], kind) for name, kind in self.kinds.items()}

    def in_pieces(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute batches of the number of samples that the file fixes; the last is filled up with its first sample."""
        count = len(next(iter(feed.values())))
        if count == self.rows:
            return self.compute(feed)
        pieces = []
        for begin in range(0, count, self.rows):
            some = {name: one[begin : begin + self.rows] for name, one in feed.items()}
            short = self.rows - len(next(iter(some.values())))
            pieces.append(
                self.compute(
                    {name: torch.cat([one, *[one[:1]] * short]) for name, one in some.items()} if short else some
                )
            )
        return {
            name: torch.cat([one[name] for one in pieces])[:count] if first.dim() and len(first) == self.rows else first
            for name, first in pieces[0].items()
        }

    @abstractmethod
    def compute(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, for inputs of a number of samples that the file takes."""


class OnnxFileModule(OnnxCall):
    """The file as it is, computed by onnxruntime as a whole."""

    def __init__(self, path: Path) -> None:
        with reading_onnx(path):
            super().__init__(onnx.load(path, load_external_data=False).graph)
            self.runner = SharedSession(session(path))

    def compute(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.runner(feed, self.outputs)


class SharedSession:
    """An onnxruntime session, which copies of a module share."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSession:
        return self

    def __call__(self, feed: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        try:
            found = self.runner.run(
                list(outputs), {name: one.detach().contiguous().numpy() for name, one in feed.items()}
            )
        except Exception as error:
            raise Mistake(f"onnxruntime can't compute the file on these samples: {reason(error)}") from error
        return {name: torch.from_numpy(one) for name, one in zip(outputs, found, strict=True)}


def as_dtype(name: str, tensor: Tensor, kind: Any) -> Tensor:
    """An input in the file's dtype, if both are integers or both are floating point."""
    wanted: torch.dtype = torch.from_numpy(kind.type(0).reshape(1)).dtype
    if tensor.is_floating_point() != wanted.is_floating_point:
        raise Mistake(f"the ONNX file's input {name} is {wanted}, and the job gives {tensor.dtype}")
    return tensor.to(wanted)


def read_onnx(path: Path) -> onnx.ModelProto:
    """The file's model, with constants of nodes as initializers."""
    with reading_onnx(path):
        model = onnx.load(path, load_external_data=False)
        for one in filter(
            uses_external_data, model.graph.initializer
        ):  # other constants have their numbers in the file
            check_size(path.parent / ExternalDataInfo(one).location)
            load_external_data_for_tensor(one, str(path.parent))
            one.data_location = onnx.TensorProto.DEFAULT
        return with_inner_constants(model)


def with_inner_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    kept = []
    for node in model.graph.node:
        value = next((one for one in node.attribute if one.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(value.t), node.output[0]))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model
