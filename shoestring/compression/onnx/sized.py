"""The ONNX file of a compression: within the size that was asked for, and measured itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.compression.calibration.fidelity import Fidelity, FidelitySums, Forward
from shoestring.compression.calibration.model_outputs import Outputs, named_tensors
from shoestring.compression.onnx.export import Exported, exported
from shoestring.compression.onnx.interface import interface_of, outputs_of
from shoestring.compression.session import CompressSession, begun
from shoestring.core.batch import Batch
from shoestring.core.errors import OverBudget
from shoestring.core.units import bytes_text

TRIES = 6  # plans, each smaller by what the file of the last one was too large
MARGIN = 64  # bytes that a plan is made smaller beyond that: shapes and names differ a little


@dataclass(frozen=True)
class OnnxFile:
    """What was written, and the fidelity of this very file in onnxruntime."""

    made: Exported
    fidelity: Fidelity

    def as_json(self, target: Path) -> dict[str, Any]:
        return {
            "path": str(target),
            "bytes": self.made.bytes,
            "tolerance": self.made.tolerance,
            "largest_difference": self.made.largest_difference,
            "notes": list(self.made.notes),
            "fidelity": {"mean": self.fidelity.mean, "worst": self.fidelity.worst, "n": self.fidelity.count},
        }

    def missed(self, session: CompressSession) -> list[str]:
        """What was asked for and does not hold of the file. Its size does: else it is not written."""
        least = session.asked.budget.quality
        if least is None or self.fidelity.mean >= least:
            return []
        return [
            f"measured on unseen data in onnxruntime, the ONNX file's fidelity is {self.fidelity.mean:.6f}, and {least:g} was asked "
            f"for"
        ]


def onnx_file(session: CompressSession, path: Path, fast: bool) -> tuple[CompressSession, OnnxFile]:
    """Write the ONNX file of a plan; where it is larger than the size that was asked for, that of a smaller plan, which is given back too.
    Raises OverBudget, and leaves no file, if none is small enough."""
    now, size = session, session.asked.budget.size
    least, smallest = float("inf"), session
    for _ in range(TRIES):
        model = now.plan.made().model
        made = exported(
            model,
            now.source.job.forward,
            now.given.unseen[0],
            path,
            fast=fast,
            calibration=now.given.calibration if fast else (),
            enough=partial(keeps_budget, now, model),
        )
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
            now = begun(
                session.source, replace(session.asked, budget=budget), session.outcome.plain.cost, session.given
            )
        except OverBudget:  # the smallest file so far is the nearest
            break
    way = (
        "in int8 it has a byte a number, whatever the plan"
        if fast
        else ("ONNX has numbers of 4, 8, 16 and 32 bits, and the graph takes bytes too")
    )
    raise OverBudget(
        f"the smallest ONNX file that was found takes {bytes_text(least)} ({least:,.0f} bytes), and --size "
        f"{bytes_text(size or 0)} was asked for: {way}; allow {least:,.0f} bytes, or leave --to out and keep the packed "
        f"folder",
        smallest.plan,
    )


def keeps_budget(session: CompressSession, model: nn.Module, path: Path) -> bool:
    """Whether a file is as small and as close to the original as was asked for. The samples that plans are confirmed with decide: what is
    reported is measured on others."""
    budget = session.asked.budget
    if budget.size is not None and path.stat().st_size > budget.size:
        return False
    return budget.quality is None or file_fidelity(session, model, path, session.given.checked).mean >= budget.quality


def file_fidelity(session: CompressSession, model: nn.Module, path: Path, batches: Sequence[Batch]) -> Fidelity:
    """How close the file's answers are to the original's."""
    study, comparison = session.plan.cost.study, FidelitySums([])
    for batch, found in zip(batches, file_answers(path, model, session.source.job.forward, batches), strict=True):
        comparison = (
            comparison if comparison.outputs else FidelitySums([one for one in study.measures if one.name in found])
        )
        comparison.add(found, study.said([batch], session.source.model)[0])
    return comparison.fidelity


def file_answers(path: Path, model: nn.Module, forward: Forward, batches: Sequence[Batch]) -> Iterator[Outputs]:
    """What the file says, by the names that the model's own outputs are compared by."""
    from shoestring.compression.onnx.check import ran, session

    runner, interface = session(path), interface_of(model, forward, batches[0])
    with torch.no_grad():
        result = forward(model, batches[0])
    known = {id(one): name for name, one in named_tensors(result)}
    names = [known.get(id(one), "") for one in outputs_of(result).values()]  # in the order of the file's
    for batch in batches:
        yield {
            name: torch.from_numpy(one)
            for name, one in zip(names, ran(runner, interface.feed(batch)), strict=True)
            if name
        }
