"""The parts of the planner's outcome that only training plans have, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoestring.core.units import bytes_text
from shoestring.planning.quantities import MEASURABLE
from shoestring.runs.reports.plan_summary import CutPlan
from shoestring.show.outcome import outcome_text
from shoestring.show.terminal import PIPE, Screen, align_columns, bar, indent_text, plain
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = tuple(one for one in MEASURABLE if not one.optional)


def training_outcome_text(outcome: TrainingOutcome, screen: Screen = PIPE) -> str:
    plan = outcome.chosen
    about = [*paragraph(disk_lines(plan)), *paragraph(sending_lines(plan)), *standing(plan, screen), *peak_part(plan)]
    return outcome_text(outcome, COLUMNS, screen, about)


def paragraph(lines: list[str]) -> list[RenderableType]:
    return [*map(plain, lines), *[""] * bool(lines)]


def disk_lines(plan: TrainingPlan) -> list[str]:
    """A plan's traffic to and from the disk."""
    moved, stored = plan.predicted["traffic_bytes"], plan.predicted["stored_bytes"]
    lines = []
    if moved:
        lines += [
            f"to and from the disk: {bytes_text(moved)} a step, at {bytes_text(plan.details.disk_speed)}/s as measured on this "
            f"machine"
        ]
    return lines + [f"on the disk of the run: {bytes_text(stored)} of state"] * bool(stored)


def sending_lines(plan: TrainingPlan) -> list[str]:
    """A plan's traffic between workers."""
    if plan.details.world == 1:
        return []
    by_first, by_others = plan.predicted["sent_bytes"], plan.predicted["sent_by_others_bytes"]
    if by_others:
        sending = (
            f"The first keeps the weights and sends {bytes_text(by_first)} a step if all are as fast, less if some are late; "
            f"each of the others sends it {bytes_text(by_others)} in each of its own steps"
        )
    elif by_first:
        sending = f"Each sends {bytes_text(by_first)} a step to the others"
    else:
        sending = "They send nothing: they share memory"
    return [f"{plan.details.world} workers train together; these are the figures of the largest. {sending}"]


def standing(plan: TrainingPlan, screen: Screen) -> list[RenderableType]:
    """How workers are arranged, where the model is cut, and the timeline; empty for one worker."""
    from shoestring.show.cut import mesh_text, model_cut
    from shoestring.show.timeline import cut_parts

    found = plan.details
    if not found.mesh:
        return []
    mesh = plain(f"mesh: {mesh_text(found.mesh)} ({', '.join(f'{axis} {size}' for axis, size in found.mesh.items())})")
    if found.staging is None:
        return [mesh, ""]
    cut = model_cut(CutPlan(found.mesh, found.staging, found.ranks))
    return [mesh, *([indent_text(cut.why)] if cut.why else []), "", *cut_parts(cut, screen), ""]


def peak_part(plan: TrainingPlan) -> list[RenderableType]:
    """The moment of the peak and what it consists of; empty if unknown."""
    parts = plan.details.parts
    if not parts:
        return []
    whole = sum(parts.values()) or 1
    rows = ((name, bytes_text(size), bar(size / whole)) for name, size in parts.items() if size * 200 > whole)
    return [plain(f"the peak is in the {plan.details.where}:"), align_columns(rows, right=1)]
