"""Run an ONNX file in onnxruntime and compare its outputs with the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from shoestring.compression.onnx.interface import Interface, named_tensors, outputs_of, replace_tensors
from shoestring.compression.onnx.open_lengths import OtherSizes
from shoestring.compression.onnx.trace import reason
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake


def session(path: Path | bytes, threads: int = 1) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU with this many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what fails is raised too
    return onnxruntime.InferenceSession(
        path if isinstance(path, bytes) else str(path), options, providers=["CPUExecutionProvider"]
    )


def run_session(runner: onnxruntime.InferenceSession, tensors: Mapping[str, Tensor]) -> list[Any]:
    """Run a session on inputs by name. Inputs that are not in the file, because the model ignores them, are left
    out."""
    wanted = {one.name for one in runner.get_inputs()}
    found: list[Any] = runner.run(
        None, {name: tensor.detach().numpy() for name, tensor in tensors.items() if name in wanted}
    )
    return found


def largest_difference(
    path: Path | bytes,
    model: nn.Module,
    forward: Callable[[nn.Module, Any], Any],
    batch: Batch,
    interface: Interface,
    opened: Mapping[str, tuple[int, ...]],
    norm: bool = False,
) -> float:
    """Largest difference between the file's outputs and the model's, on the batch and on batches in which every dynamic
    dimension has another size. Raises OtherSizes if one of the two can't compute those."""
    try:
        runner = session(path)
        results = [run_session(runner, interface.feed(batch))]
    except Exception as error:
        raise Mistake(
            f"onnxruntime can't run what was exported: {reason(error)}; keep the packed folder, which needs no export"
        ) from error
    batches = [batch]
    for one in batches_of_other_sizes(interface.part(batch), interface.names, opened):
        try:
            results.append(run_session(runner, interface.feed(one)))
        except Exception as error:
            raise OtherSizes(f"onnxruntime can't run other sizes of the exported model: {reason(error)}") from error
        batches.append(one)
    with torch.no_grad():
        expected = [outputs_of(forward(model, batch))]
        try:
            expected += [outputs_of(forward(model, one)) for one in batches[1:]]
        except Exception as error:
            raise OtherSizes(
                f"the model can't take other sizes, which its ONNX file leaves open: {reason(error)}"
            ) from error
    return max(difference(one, found, norm) for one, found in zip(expected, results, strict=True))


def batches_of_other_sizes(
    batch: Batch, names: Sequence[str], opened: Mapping[str, tuple[int, ...]]
) -> Iterator[Batch]:
    """The batch repeated, if the number of samples is dynamic; and without its last position, for every other axis that
    is dynamic."""
    tensors = dict(zip(names, (one for _, one in named_tensors(batch)), strict=True))
    if any(0 in dims for dims in opened.values()):
        yield replace_tensors(
            batch,
            [
                torch.cat([one, one]) if one.ndim and 0 in opened.get(name, (0,)) else one
                for name, one in tensors.items()
            ],
        )
    for axis in sorted({axis for dims in opened.values() for axis in dims if axis}):
        long = {name for name, one in tensors.items() if axis in opened.get(name, ()) and one.shape[axis] > 2}
        if long:
            yield replace_tensors(
                batch,
                [
                    one.narrow(axis, 0, one.shape[axis] - 1).contiguous() if name in long else one
                    for name, one in tensors.items()
                ],
            )


def difference(expected: Mapping[str, Tensor], found: list[Any], norm: bool = False) -> float:
    """Relative difference of the output that differs most, by maximum or, with `norm`, by norm."""
    worst = 0.0
    for (name, one), other in zip(expected.items(), found, strict=True):
        if tuple(one.shape) != other.shape:
            raise OtherSizes(
                f"output {name} has the shape {list(one.shape)} in torch and {list(other.shape)} in onnxruntime; keep the packed "
                f"folder, which needs no export"
            )
        first, second = one.detach().double().numpy(), np.asarray(other, np.float64)
        if not first.size:
            continue
        if not np.array_equal(np.isfinite(first), np.isfinite(second)):
            return float("inf")
        finite = np.isfinite(first)
        measure = np.linalg.norm if norm else lambda values: np.abs(values).max(initial=0.0)
        size = float(measure(first[finite])) or 1.0
        worst = max(worst, float(measure(first[finite] - second[finite])) / size)
    return worst
