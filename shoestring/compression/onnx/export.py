"""Export a model with its packed weights as one ONNX file for onnxruntime.

The model is traced (`trace.py`), and its file is run in onnxruntime and compared with the model before it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.exits.early_exit import EarlyExitModel
from shoestring.compression.formats.int8 import Int8Format
from shoestring.compression.formats.packed_modules import formats_of
from shoestring.compression.onnx.interface import Forward, Interface, interface_of
from shoestring.compression.onnx.open_lengths import BATCH_AXIS, EVERY_AXIS, NO_AXIS, OtherSizes
from shoestring.compression.onnx.trace import TOLERANCE, open_dimensions, serialize, trace_graph
from shoestring.core.batch import Batch
from shoestring.core.command_line.extras import require
from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file


@dataclass(frozen=True)
class Version:
    """A candidate graph, accepted if its outputs are within the tolerance of the model's."""

    graph: Any
    tolerance: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExportedFile:
    path: Path
    bytes: int
    tolerance: float  # upper bound of the difference
    largest_difference: float  # relative, over batches of several sizes: of maxima, with `fast` of norms
    notes: tuple[str, ...] = ()


def export_onnx(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    target: Path,
    *,
    fast: bool = False,
    calibration: Sequence[Batch] = (),
    enough: Callable[[Path], bool] = lambda path: True,
) -> ExportedFile:
    """Write a model as an ONNX file.

    `forward(model, batch)` is the job's call of the model. The batch's tensors become graph inputs and all tensors it
    returns become outputs, except losses and labels. Batch size and lengths are dynamic axes as far as the model allows
    it: if it refuses the other sizes on which the file is compared, fewer are. `fast`: linear layers and convolutions
    compute in int8, calibrated on `calibration` or else the batch (see `fast.py`); if such a file is not `enough`,
    convolutions stay in float32, with a message.
    """
    require("onnx")
    if any(isinstance(one, EarlyExitModel) for one in model.modules()):
        raise Mistake(
            "an ONNX file has one graph for all samples, and of a model with exits each takes its own way: leave EarlyExit or "
            "--to out"
        )
    model, told = without_input_quantization(model.eval())
    interface = interface_of(model, forward, batch)
    target.parent.mkdir(parents=True, exist_ok=True)
    for most in (EVERY_AXIS, BATCH_AXIS, NO_AXIS):
        try:
            made = export_with_axes(model, forward, batch, target, interface, most, fast, calibration, enough)
        except OtherSizes:
            if most == NO_AXIS:
                raise
            continue
        return replace(made, notes=(*told, *made.notes))
    raise AssertionError("the last try returns or raises")


def export_with_axes(
    model: nn.Module,
    forward: Forward,
    batch: Batch,
    target: Path,
    interface: Interface,
    most: int,
    fast: bool,
    calibration: Sequence[Batch],
    enough: Callable[[Path], bool],
) -> ExportedFile:
    """Write the file with dynamic axes below `most`. Raises OtherSizes if it does not compute what the model does at other sizes."""
    from shoestring.compression.onnx.check import largest_difference
    from shoestring.compression.onnx.fast import int8_versions

    graph, notes = trace_graph(model, forward, batch, interface, most, dense=fast)
    feeds = [interface.feed(one) for one in (calibration or (batch,))]
    versions = int8_versions(graph, feeds) if fast else iter([Version(graph, TOLERANCE)])
    with draft_file(target) as draft:

        def difference(version: Version) -> float:
            draft.write_bytes(serialize(version.graph))
            return largest_difference(
                draft, model, forward, batch, interface, open_dimensions(version.graph), norm=fast
            )

        best, largest = choose_version(versions, difference, lambda: not fast or enough(draft))
        draft.write_bytes(written := best.graph.SerializeToString())  # exactly the version that was compared
    stated = [
        f"fast: the file's output differs from the model's by {largest:.2%} (norm of the difference by its norm, one batch)"
    ] * fast
    return ExportedFile(target, len(written), best.tolerance, largest, (*notes, *best.notes, *stated))


def choose_version(
    versions: Iterator[Version], difference: Callable[[Version], float], enough: Callable[[], bool]
) -> tuple[Version, float]:
    """The first version that is within its tolerance and `enough`, else the first within its tolerance; and its
    difference. Its notes say why earlier versions were rejected."""
    within: tuple[Version, float] | None = None
    dropped: list[str] = []
    for version in versions:
        largest = difference(version)
        if largest <= version.tolerance:
            if enough():
                return replace(version, notes=(*dropped, *version.notes)), largest
            within = within or (version, largest)
        why = (
            "it is not as small and as close as was asked for"
            if largest <= version.tolerance
            else (f"its output differs by {largest:.1e} of its norm, more than {version.tolerance:g}")
        )
        dropped.append(f"not kept, because {why}: {'; '.join(version.notes)}")
    if within is None:
        raise Mistake(
            f"onnxruntime's output differs from the model's by {largest:.1e} of it, more than {version.tolerance:.1e}: nothing was "
            f"written; keep the packed folder, which needs no export, or write the file without int8"
        )
    return within


def without_input_quantization(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model with Int8 weights replaced by grids: torch's quantization of activations is not exported."""
    if all(form.keeps_inputs for form in formats_of(model).values()):
        return model, []
    changed = copy.deepcopy(model)
    for module in list(changed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Int8Format):
                setattr(module, name, child.as_grid())
    return changed, [
        "the ONNX file has the weights of the folder, but does not round the inputs of linear layers as the folder's model "
        "does (Int8 is torch's own product of bytes); onnx-int8 rounds them in onnxruntime's way"
    ]
