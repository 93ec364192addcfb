"""A federated run's own parts of its page and of the overview."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from shoestring.core.units import bytes_text
from shoestring.federated.playing.fold import FederationReport
from shoestring.federated.report.comparison_sections import comparisons
from shoestring.federated.report.page_style import STYLE_OF_FEDERATED
from shoestring.federated.report.sections import Privacy, charts, how_federated, privacy, round_line, tables
from shoestring.runs.reports.report import Report
from shoestring.show.page import in_two_columns, wide
from shoestring.show.page.drawings.charts import Line
from shoestring.show.page.drawings.drawing import strip
from shoestring.show.page.room_page import Cell, RoomCell, RoomPage
from shoestring.show.page.sections.tiles import Tile
from shoestring.show.page.words import count_text, loss_text, short


class FederatedPage(RoomPage[FederationReport]):
    note: ClassVar[str] = (
        "Bytes of one device in one round, and times. The difference is measured minus predicted; plain is the round "
        "without techniques."
    )
    plain: ClassVar[str] = "The plain round"
    at_the_end: ClassVar[tuple[str, ...]] = ("total_seconds", "epsilon")
    plans_memory: ClassVar[bool] = False
    fewer_is_early: ClassVar[bool] = True
    style: ClassVar[str] = STYLE_OF_FEDERATED
    templates: ClassVar[str] = "shoestring.federated"

    def flags(self, own: FederationReport) -> Mapping[str, object]:
        """
        >>> from shoestring.federated.options import FederateOptions
        >>> from shoestring.federated.plugin import FEDERATED
        >>> FederatedPage(FEDERATED).flags(FederationReport(FederateOptions(per_round=50, upload=2048, epsilon=4.0)))
        {'per round': 50, 'upload': '2.00 KiB', 'epsilon': '4'}
        """
        asked = vars(own.asked).items()
        return {name.replace("_", " "): asked_text(name, value) for name, value in asked if value is not None}

    def sections(self, own: FederationReport, report: Report) -> Iterable[str]:
        return [*map(wide, comparisons(own)), *in_two_columns(charts(own, report)), *in_two_columns(tables(own))]

    def tiles(self, own: FederationReport) -> Iterable[Tile]:
        return round_tiles(own)

    def ending(self, own: FederationReport, why: str) -> str:
        return how_federated(own, why)

    def cells(self, own: FederationReport) -> Iterator[RoomCell]:
        took, spent = own.rounds[-1].participants if own.rounds else None, privacy(own)
        yield RoomCell("Participants", Cell() if took is None else Cell(f"{took:,}", took), "down")
        yield RoomCell("Bytes up", Cell(bytes_text(own.up), sort_number(own.up)) if own.rounds else Cell())
        if spent is not None:
            yield RoomCell("Epsilon spent", Cell(loss_text(spent.spent), sort_number(spent.spent), spent.over))

    def lines(self, own: FederationReport) -> Iterable[tuple[str, Line]]:
        return (
            ("participants", round_line(own, lambda one: one.participants)),
            ("epsilon", round_line(own, lambda one: one.epsilon)),
            ("bytes up", round_line(own, lambda one: one.up, summed=True)),
        )


def sort_number(value: float) -> float:
    """A number to sort by."""
    return float(f"{value:.6g}")


def asked_text(name: str, value: object) -> object:
    """An option's value as people write it."""
    if isinstance(value, int) and name in ("upload", "download"):
        return bytes_text(value)
    return short(value) if isinstance(value, float) else value


def round_tiles(own: FederationReport) -> Iterator[Tile]:
    """Participants of the last round, epsilon spent, bytes, and missing devices."""
    if not own.rounds:
        return
    last = own.rounds[-1]
    of = last.participants + last.missing + len(last.rejected)
    yield Tile("Participants", f"{last.participants:,}", f"of {of:,} in the last round")
    if (spent := privacy(own)) is not None:
        yield privacy_tile(spent)
    if own.up:
        yield Tile("Sent up", bytes_text(own.up), f"{bytes_text(own.down)} down")
    yield Tile("Missing", count_text(own.missing, "time"), f"{len(own.rejections):,} turned away")


def privacy_tile(spent: Privacy) -> Tile:
    delta = "" if spent.delta is None else f"delta {short(spent.delta)}"
    if spent.budget is None:
        return Tile("Epsilon", loss_text(spent.spent), delta)
    share = spent.spent / spent.budget if spent.budget > 0 else 1.0
    bar = strip(spent.text, [(0, min(1.0, max(0.0, share)), "alert" if spent.over else "optimizer")])
    of = f"{'above' if spent.over else 'of'} {short(spent.budget)}"
    return Tile("Epsilon", loss_text(spent.spent), f"{of}, {delta}" if delta else of, spent.over, bar)
