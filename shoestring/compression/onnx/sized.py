"""Write the ONNX file of a compression within the requested size, and measure its fidelity in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shoestring.compression.begin import begin_session
from shoestring.compression.calibration.fidelity import Fidelity, FidelitySums, Forward
from shoestring.compression.calibration.model_outputs import Outputs, named_tensors
from shoestring.compression.onnx.export import ExportedFile, export_onnx
from shoestring.compression.onnx.interface import interface_of, outputs_of
from shoestring.compression.report.compress_report import OnnxReport
from shoestring.compression.room import compressed_model
from shoestring.compression.session import CompressSession
from shoestring.core.batch import Batch
from shoestring.core.errors import OverBudget
from shoestring.core.units import bytes_text

TRIES = 6  # plans; each is smaller by the excess of the previous file
MARGIN = 64  # additional bytes by which a plan is made smaller, because shapes and names differ slightly


@dataclass(frozen=True)
class OnnxFile:
    """The written file, and its fidelity in onnxruntime."""

    made: ExportedFile
    fidelity: Fidelity

    def report(self, target: Path) -> OnnxReport:
        found = {"mean": self.fidelity.mean, "worst": self.fidelity.worst, "n": self.fidelity.count}
        made = self.made
        return OnnxReport(str(target), made.bytes, made.tolerance, made.largest_difference, tuple(made.notes), found)

    def unmet_limits(self, session: CompressSession) -> list[str]:
        """Requirements that the file does not meet. It always has the requested size, else it is not written."""
        least = session.asked.budget.quality
        if least is None or self.fidelity.mean >= least:
            return []
        return [
            f"measured on unseen data in onnxruntime, the ONNX file's fidelity is {self.fidelity.mean:.6f}, and {least:g} was asked "
            f"for"
        ]


def onnx_file(session: CompressSession, path: Path, fast: bool) -> tuple[CompressSession, OnnxFile]:
    """Write the ONNX file of a plan. If it is larger than requested, write that of a smaller plan, whose session is
    returned too. Raises OverBudget, and leaves no file, if none is small enough."""
    now, size = session, session.asked.budget.size
    least, smallest = float("inf"), session
    for _ in range(TRIES):
        model = compressed_model(now.plan).model
        made = written_file(now, model, path, fast)
        if size is None or made.bytes <= size:
            return replace(now, asked=session.asked), OnnxFile(made, file_fidelity(now, model, path, now.given.unseen))
        path.unlink()
        if made.bytes < least:
            least, smallest = made.bytes, now
        smaller = int(now.plan.numbers()["size_bytes"] - (made.bytes - size) - MARGIN)
        if fast or session.asked.use is not None or session.healed is not None or smaller <= 0:
            break
        budget = replace(session.asked.budget, size=smaller)
        try:
            now = begin_session(
                session.source, replace(session.asked, budget=budget), session.plain.details.cost, session.given
            )
        except OverBudget:  # keep the smallest file so far
            break
    way = (
        "in int8 it has a byte a number, whatever the plan"
        if fast
        else ("ONNX has numbers of 4, 8, 16 and 32 bits, and the graph takes bytes too")
    )
    raise OverBudget(
        f"the smallest ONNX file that was found takes {bytes_text(least)} ({least:,.0f} bytes), and "
        f"{bytes_text(size or 0)} was asked for with --size: {way}; allow {least:,.0f} bytes, or leave --to out and keep the packed "
        f"folder",
        smallest.plan,
    )


def written_file(session: CompressSession, model: nn.Module, path: Path, fast: bool) -> ExportedFile:
    """Write a packed model: what torch traces of it or, if an ONNX file was compressed, that file."""
    source, given = session.source, session.given
    if source.file is not None:
        from shoestring.compression.onnx.onnx_source import write_onnx

        return write_onnx(model, source.job, given.unseen[0], path)
    return export_onnx(
        model,
        source.job.forward,
        given.unseen[0],
        path,
        fast=fast,
        calibration=given.calibration if fast else (),
        enough=partial(keeps_budget, session, model),
    )


def keeps_budget(session: CompressSession, model: nn.Module, path: Path) -> bool:
    """Whether a file meets the requested size and quality. This is decided on the samples that confirm plans; the
    reported fidelity is measured on others."""
    budget = session.asked.budget
    if budget.size is not None and path.stat().st_size > budget.size:
        return False
    return budget.quality is None or file_fidelity(session, model, path, session.given.checked).mean >= budget.quality


def file_fidelity(session: CompressSession, model: nn.Module, path: Path, batches: Sequence[Batch]) -> Fidelity:
    """Fidelity of the file's outputs to the original's."""
    study, comparison = session.plan.details.cost.study, FidelitySums([])
    if session.source.file is not None:
        from shoestring.compression.onnx.file_module import OnnxFileModule

        return study.comparison(batches, OnnxFileModule(path), OnnxFileModule(session.source.file)).fidelity
    for batch, found in zip(batches, file_outputs(path, model, session.source.job.forward, batches), strict=True):
        comparison = (
            comparison if comparison.outputs else FidelitySums([one for one in study.measures if one.name in found])
        )
        comparison.add(found, study.outputs([batch], session.source.model)[0])
    return comparison.fidelity


def file_outputs(path: Path, model: nn.Module, forward: Forward, batches: Sequence[Batch]) -> Iterator[Outputs]:
    """The file's outputs, by the names under which the model's outputs are compared."""
    from shoestring.compression.onnx.check import run_session, session

    runner, interface = session(path), interface_of(model, forward, batches[0])
    with torch.no_grad():
        result = forward(model, batches[0])
    known = {id(one): name for name, one in named_tensors(result)}
    names = [known.get(id(one), "") for one in outputs_of(result).values()]  # in the order of the file's
    for batch in batches:
        yield {
            name: torch.from_numpy(one)
            for name, one in zip(names, run_session(runner, interface.feed(batch)), strict=True)
            if name
        }
