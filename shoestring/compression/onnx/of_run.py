"""The weights of a run as an ONNX file, which was run and compared with the model."""

from __future__ import annotations

from shoestring.compression.loading.source import model_of_checkpoint, prepare_model, samples_of
from shoestring.compression.onnx.export import export_onnx
from shoestring.core.command_line.extras import require
from shoestring.runs.reports.export import Exported, WeightsExport, new


def export_floats(asked: WeightsExport) -> Exported:
    return export_run(asked, fast=False)


def export_int8(asked: WeightsExport) -> Exported:
    return export_run(asked, fast=True)


def export_run(asked: WeightsExport, fast: bool) -> Exported:
    require("onnx")
    new(asked.target)
    job = asked.job()
    given = samples_of(job, 2)
    model = prepare_model(model_of_checkpoint(job, asked.checkpoint, asked.trained))
    calibration = given.calibration if fast else ()
    made = export_onnx(model, job.forward, given.unseen[0], asked.target, fast=fast, calibration=calibration)
    about = {"bytes": made.bytes, "tolerance": made.tolerance, "largest_difference": made.largest_difference}
    return Exported(made.path, made.notes, about)
