"""Compress an ONNX file: calibrate its graph, write the file again with packed weights, and measure it in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from shoestring.compression.calibration.latency import latencies, latency, one_sample
from shoestring.compression.formats.packed_modules import formats_of
from shoestring.compression.loading.source import ModelSource, prepare_model
from shoestring.compression.onnx.emit import write_weight
from shoestring.compression.onnx.export import ExportedFile
from shoestring.compression.onnx.file_module import OnnxFileModule, read_onnx, reading_onnx
from shoestring.compression.onnx.graph import Graph
from shoestring.compression.onnx.graph_module import OnnxGraphModule, check_weights_found
from shoestring.compression.onnx.trace import OPSET, TOLERANCE, reason
from shoestring.compression.report.compress_report import Amount, CompressReport, LatencyReport, OnnxReport
from shoestring.compression.session import CompressedMeasurement, CompressSession
from shoestring.core.batch import Batch
from shoestring.core.command_line.extras import require
from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file
from shoestring.core.job import Job

FILE = "model.onnx"


def onnx_model_source(path: Path, job: Job, notes: Iterable[str] = ()) -> ModelSource:
    """The model of an ONNX file, with data from the job, whose own model is not used."""
    require("onnx")
    OnnxFileModule(path)  # onnxruntime refuses more than onnx does
    with reading_onnx(path):
        graph, told = with_blockwise_operators(read_onnx(path))
        model = OnnxGraphModule(graph)
    check_weights_found(model, str(path))
    kept = replace(job, model=lambda: OnnxGraphModule(graph), weights="")
    about: dict[str, Any] = {"job": None, "edits": [], "decoded": 0}
    prepared = prepare_model(model)
    check = partial(check_same, path, kept, prepared)
    return ModelSource(kept, prepared, about, (*notes, *told), path.stem, path, check)


def with_blockwise_operators(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """The model in the first version of ONNX's operators that has 4-bit weights, and a message if it was an older one."""
    version = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), OPSET)
    if version >= OPSET:
        return model, []
    try:
        return onnx.version_converter.convert_version(model, OPSET), [
            f"the file's operators are of version {version}; they are converted to {OPSET}, the first that has 4-bit weights"
        ]
    except Exception as error:
        raise Mistake(
            f"the file's operators are of version {version}, 4-bit weights need {OPSET}, and onnx can't convert it "
            f"({reason(error)}): export it again with opset_version={OPSET}"
        ) from error


def check_same(path: Path, job: Job, model: nn.Module, batch: Batch) -> None:
    """Refuse a file that onnxruntime computes otherwise as a whole than in the segments that are calibrated."""
    difference = outputs_difference(job, OnnxFileModule(path), model, batch)
    if not difference <= TOLERANCE:
        raise Mistake(
            f"{path} can't be calibrated: divided at its weights it gives outputs that differ by {difference:.1e} of the "
            f"largest from those of the whole file (it draws random numbers, or keeps state)"
        )


def outputs_difference(job: Job, one: nn.Module, other: nn.Module, batch: Batch) -> float:
    """Largest difference between the outputs of two modules, relative to the largest output."""
    from shoestring.compression.onnx.interface import all_outputs

    with torch.no_grad():
        mine, others = (all_outputs(job.forward(model, batch)) for model in (one, other))
    worst = 0.0
    for name, value in mine.items():
        if value.is_floating_point() and value.numel():
            apart = (value - others[name]).abs().nan_to_num(nan=0.0 if bool(value.isnan().any()) else torch.inf)
            worst = max(worst, float(apart.max() / value.abs().max().clamp(min=1e-30)))
    return worst


def write_onnx(model: nn.Module, job: Job, batch: Batch, target: Path) -> ExportedFile:
    """Write the file with the module's packed weights; everything else stays as it was. It is run and compared."""
    assert isinstance(model, OnnxGraphModule), "it is an ONNX file's"
    proto = onnx.ModelProto()
    proto.CopyFrom(model.steps.graph.model)
    graph, forms, notes = Graph(proto), formats_of(model), list[str]()
    for holder, name in model.names.items():
        if (form := forms.get(f"{holder}.weight")) is not None:
            del graph.constants[name]
            notes += write_weight(graph, name, form)
    del (written := graph.proto()).graph.value_info[:]
    with draft_file(target) as draft:
        draft.write_bytes(written.SerializeToString())
        difference = outputs_difference(job, OnnxFileModule(draft), model, batch)
        if not difference <= TOLERANCE:
            raise Mistake(
                f"the compressed file's outputs differ by {difference:.1e} of the largest from what was chosen, more than "
                f"{TOLERANCE:g}: nothing was written; this is an error of shoestring or onnxruntime"
            )
    return ExportedFile(target, target.stat().st_size, TOLERANCE, difference, tuple(notes))


@dataclass(frozen=True)
class OnnxSession(CompressSession):
    """The session of an ONNX file, whose result is a file too: everything is measured in onnxruntime."""

    draft: Path = field(default=Path())  # the file that was written
    made: ExportedFile | None = None

    @property
    def original(self) -> nn.Module:
        assert self.source.file is not None, "it is an ONNX file's"
        return OnnxFileModule(self.source.file)

    def write_and_measure(self, target: Path) -> CompressedMeasurement:
        self.draft.replace(target / FILE)
        loaded, notes = OnnxFileModule(target / FILE), list[str]()
        mine, plain = latencies([loaded, self.original], self.source.job.forward, one_sample(self.given.unseen[0]))
        busy = (f"{mine.warning}; the original took {1e3 * plain.p50:.3g} ms in turns with it",) * bool(mine.warning)
        found, now, before = self.compare_loaded(loaded, notes)
        size = (target / FILE).stat().st_size
        predicted = self.predicted_metrics(loaded, before)
        return CompressedMeasurement(size, size, mine, found, now, before, predicted, (*busy, *notes))

    def report(self, measured: CompressedMeasurement, folder: Path) -> CompressReport:
        report, path, made = super().report(measured, folder), folder / FILE, self.made
        latency, fidelity = report.latency_ms, measured.fidelity
        assert made is not None and self.source.file is not None, "it was written"
        return replace(
            report,
            latency_ms=LatencyReport(Amount(None, latency.p50.measured), Amount(None, latency.p99.measured)),
            memory_bytes=Amount(),
            plain=replace(report.plain, size_bytes=self.source.file.stat().st_size, memory_bytes=None),
            files=(FILE,),
            onnx=OnnxReport(
                str(path),
                made.bytes,
                made.tolerance,
                made.largest_difference,
                made.notes,
                {"mean": fidelity.mean, "worst": fidelity.worst, "n": fidelity.count},
            ),
        )


def session_of_file(session: CompressSession, made: ExportedFile, draft: Path) -> OnnxSession:
    """The session of an ONNX file that was written to `draft`."""
    shared = {one.name: getattr(session, one.name) for one in fields(CompressSession)}
    assert session.source.file is not None, "it is an ONNX file's"
    plain = latency(
        OnnxFileModule(session.source.file), session.source.job.forward, one_sample(session.given.unseen[0])
    )  # of the whole file: plans know that of its segments
    return OnnxSession(**shared | {"plain_latency": plain}, draft=draft, made=made)


NEEDS_MODULES = (
    "{} needs the PyTorch model, because it changes modules or trains them, and an ONNX file has only a graph: compress the run "
    "or the weights that it was made from, with --to onnx"
)
APPLIES = ("Quantize", "Half", "Codebook")  # techniques whose formats have operators in ONNX


def check_applies(asked: Mapping[str, Any]) -> None:
    """Refuse options that do not apply to an ONNX file."""
    if asked.get("heal"):
        raise Mistake(NEEDS_MODULES.format("--heal"))
    if asked.get("to") == "onnx-int8":
        raise Mistake(NEEDS_MODULES.format("--to onnx-int8"))
    if asked.get("latency"):
        raise Mistake(
            "--latency chooses between ways to run a PyTorch model; how long onnxruntime takes for an ONNX file is measured and "
            "reported, but plans do not predict it: leave --latency out"
        )
    for one in asked.get("use") or ():
        name = str(one).partition("(")[0].strip()
        if name not in APPLIES:
            raise Mistake(
                NEEDS_MODULES.format(name)
                if name not in ("Sparsify", "ProductQuantize", "Decode", "Int8")
                else f"{name} has no operators in ONNX: for an ONNX file there are {', '.join(APPLIES)}"
            )
