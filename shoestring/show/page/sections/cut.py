"""The section on a model that is cut across workers: the timeline, predicted and measured, and what every stage holds."""

from __future__ import annotations

from markupsafe import Markup

from shoestring.runs.reports.report import Report
from shoestring.show.cut import ModelCut, model_cut
from shoestring.show.page.drawings.timeline import timeline_svg
from shoestring.show.page.render import render

MOST_ROWS = 16


def stages(report: Report) -> Markup:
    """The section; empty if the model is not cut."""
    if report.plan.cut is None:
        return Markup()
    cut = model_cut(report.plan.cut, report.timed)
    figure = timeline_svg(cut.predicted, cut.measured) if any(cut.predicted) else Markup()
    return render(
        "stages.html",
        note=note(cut),
        figure=figure,
        rows=cut.rows[:MOST_ROWS],
        more=len(cut.rows) - MOST_ROWS,
        measured=any(row.measured is not None for row in cut.rows),
    )


def note(cut: ModelCut) -> str:
    """The text above the picture."""
    said = [f"{cut.mesh}; {cut.way}", *cut.why.split("; ")[:1], cut.note]
    return " ".join(f"{one[:1].upper()}{one[1:]}." for one in said if one)
