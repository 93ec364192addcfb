"""What a training run has on its page beside what all runs have: what its techniques counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.files.codec import Unreadable, from_json
from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import Report
from shoestring.show.page import wide
from shoestring.show.page.room_page import RoomPage
from shoestring.training.report.staleness_section import StalenessReport, staleness


@dataclass(frozen=True)
class TechniqueStates:
    pushes: StalenessReport | None = None


@dataclass(frozen=True)
class TrainingReport:
    """What the report.json of a finished run says of its techniques."""

    state_of_techniques: TechniqueStates = TechniqueStates()


class TrainingPage(RoomPage[TrainingReport | None]):
    plain: ClassVar[str] = "Plain training"
    note: ClassVar[str] = (
        "Highest memory at any moment, and the time of one step. The difference is measured minus predicted; "
        "plain is what training without any technique would need."
    )
    templates: ClassVar[str] = "shoestring.training"

    def sections(self, own: TrainingReport | None, report: Report) -> Iterator[str]:
        if own is not None and own.state_of_techniques.pushes is not None:
            yield wide(staleness(own.state_of_techniques.pushes))


def training_report(folder: Folder) -> TrainingReport | None:
    """None where techniques counted nothing."""
    try:
        found = from_json(TrainingReport, folder.read("report.json") or {}, unknown="ignored")
    except Unreadable as error:
        raise folder.unusable("report.json", error) from error
    return found if found != TrainingReport() else None
