"""The model in onnxruntime, in float32 or with linear layers in int8, in one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shoestring.compression.onnx.export import ExportedFile, export_onnx
from shoestring.compression.onnx.interface import Forward, interface_of
from shoestring.core.batch import Batch
from shoestring.core.command_line.extras import require
from shoestring.core.errors import Mistake, error_sentence
from shoestring.serving.engines.comparison import References, references
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.engines.outputs import Compute, answers_alone
from shoestring.serving.engines.signature import ModelInterface, torch_compute
from shoestring.serving.engines.together import compute_answers, way_together
from shoestring.serving.engines.torch_engine import check_repeats, tolerance_of
from shoestring.serving.sample import Answers, Sample

# What int8 changes is measured on some samples of the job, and another sample may change more
MARGIN = 2.0


class OnnxEngine(ServingEngine):
    """Exports the model to a file, which stays there, and answers from it.

    `fast`: int8, calibrated on the samples of the interface; the tolerance is then measured on those, times a margin.
    """

    packs = False
    why_not_packed = "an ONNX file has one graph, whose attention takes a padded batch"

    def __init__(
        self, model: nn.Module, forward: Forward, interface: ModelInterface, file: Path, *, fast: bool = False
    ) -> None:
        require("onnx")
        model = model.eval()
        original = torch_compute(model, forward)
        with torch.inference_mode():
            rounding = tolerance_of(model, interface)
            check_repeats(model, original, interface, rounding)
            seen = references(original, interface)
            interface = way_together(original, interface, seen, rounding, model).interface
        longest = interface.samples[-1]
        batches = [interface.inputs.batch([one]) for one in seen.samples]
        self.exported = export_onnx(
            model, forward, interface.inputs.batch([longest, longest]), file, fast=fast, calibration=batches
        )
        self.compute = file_compute(model, forward, interface.inputs.batch([longest]), self.exported)
        own = own_references(self.compute, interface, seen)
        changed = max(difference_to(seen, own), 0.0)
        self.tolerance = max(rounding, MARGIN * changed) if fast else max(rounding, self.exported.tolerance)
        if changed > self.tolerance:
            raise Mistake(
                f"onnxruntime's answers differ from the model's by {changed:.1e} on samples of the job, more than "
                f"{self.tolerance:.1e}: leave this engine out"
            )
        # Rounding to int8 may turn a last bit into a step: batches may differ as much as int8 changes anyway
        believed = way_together(self.compute, interface, own, max(rounding, changed), model)
        self.together, self.interface, self.why_not_padded = believed.together, believed.interface, believed.why
        self.signature, self.known = self.interface.signature, self.interface.samples[0]

    def answers(self, samples: Sequence[Sample]) -> Answers:
        return compute_answers(self.compute, self.interface, self.together, samples) if samples else []


def file_compute(model: nn.Module, forward: Forward, batch: Batch, exported: ExportedFile) -> Compute:
    """Outputs of a file's graph by the names that the model gives them."""
    from shoestring.compression.onnx.check import run_session, session

    runner = session(exported.path)
    named = interface_of(model, forward, batch)
    with torch.inference_mode():
        names = tuple(torch_compute(model, forward)(batch))

    def compute(given: Batch) -> Mapping[str, Tensor]:
        results = run_session(runner, named.feed(given))
        return {name: torch.from_numpy(one) for name, one in zip(names, results, strict=True)}

    return compute


def own_references(compute: Compute, interface: ModelInterface, seen: References) -> References:
    """The same samples and batches, with what the file says to each sample alone."""
    try:
        alone = answers_alone(compute, interface.inputs, interface.outputs, seen.samples)
    except Exception as error:  # of onnxruntime: a length that torch's exporter fixed
        raise Mistake(
            f"the ONNX file does not take all samples that the model takes ({error_sentence(error)}): leave this engine out"
        ) from error
    return References(seen.samples, alone, seen.batches)


def difference_to(seen: References, own: References) -> float:
    """How far the file's answers are from the model's."""
    return seen.difference(lambda samples: own.alone, range(len(seen.samples)))
