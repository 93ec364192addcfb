"""What a federated run has on its page, and in the overview of several runs, beside what all runs have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from shoestring.core.units import bytes_text
from shoestring.federated.comparison_sections import comparisons
from shoestring.federated.page_style import STYLE_OF_FEDERATED
from shoestring.federated.sections import Privacy, charts, how_federated, last_of, privacy, round_line, tables, total
from shoestring.show.page import paired, wide
from shoestring.show.page.charts import Line
from shoestring.show.page.drawing import strip
from shoestring.show.page.room_page import Cell, RoomCell, RoomPage
from shoestring.show.page.tiles import Tile
from shoestring.show.page.words import Entries, counted, inner, loss_text, number, short


class FederatedPage(RoomPage):
    note: ClassVar[str] = (
        "Bytes of one device in one round, and times. The difference is that of what was measured from what was predicted; plain "
        "is the round without any technique."
    )
    at_the_end: ClassVar[tuple[str, ...]] = ("total_seconds", "epsilon")
    plans_memory: ClassVar[bool] = False
    fewer_is_early: ClassVar[bool] = True
    style: ClassVar[str] = STYLE_OF_FEDERATED
    templates: ClassVar[str] = "shoestring.federated"

    def flags(self, story: Entries) -> Mapping[str, object]:
        """
        >>> from shoestring.federated.plugin import FEDERATED
        >>> FederatedPage(FEDERATED).flags({"federated": {"asked": {"per_round": 50, "upload": 2048, "epsilon": 4.0, "delta": None}}})
        {'per round': 50, 'upload': '2.00 KiB', 'epsilon': '4'}
        """
        asked = inner(inner(story, "federated"), "asked").items()
        return {str(name).replace("_", " "): asked_text(name, value) for name, value in asked if value is not None}

    def sections(self, story: Entries) -> Iterable[str]:
        return [*map(wide, comparisons(story)), *paired(charts(story)), *paired(tables(story))]

    def tiles(self, story: Entries) -> Iterable[Tile]:
        return round_tiles(story)

    def ending(self, story: Entries, why: str) -> str:
        return how_federated(story, why)

    def cells(self, story: Entries) -> Iterator[RoomCell]:
        took, up, spent = last_of(story, "participants"), total(story, "bytes_up", "up"), privacy(story)
        yield RoomCell("Participants", Cell() if took is None else Cell(f"{took:,.0f}", rounded(took)), "down")
        yield RoomCell("Bytes up", Cell() if up is None else Cell(bytes_text(up), rounded(up)))
        if spent is not None:
            yield RoomCell("Epsilon spent", Cell(loss_text(spent.spent), rounded(spent.spent), spent.over))

    def lines(self, story: Entries) -> Iterable[tuple[str, Line]]:
        return (
            ("participants", round_line(story, "participants", "", "")),
            ("epsilon", round_line(story, "epsilon", "", "")),
            ("bytes up", round_line(story, "up", "", "", summed=True)),
        )


def rounded(value: float) -> float:
    """A number to sort by."""
    return float(f"{value:.6g}")


def asked_text(name: str, value: object) -> object:
    """A value of a flag as people write it."""
    known = number(value)
    if known is not None and name in ("upload", "download"):
        return bytes_text(known)
    return short(known) if isinstance(known, float) else value


def round_tiles(story: Entries) -> Iterator[Tile]:
    """Who took part in the last round, the privacy that is spent, bytes, and who is missing."""
    took, away, turned = (last_of(story, name) for name in ("participants", "missing", "rejected"))
    if took is not None:
        yield Tile("Participants", f"{took:,.0f}", f"of {took + (away or 0) + (turned or 0):,.0f} in the last round")
    if (spent := privacy(story)) is not None:
        yield privacy_tile(spent)
    up, down = total(story, "bytes_up", "up"), total(story, "bytes_down", "down")
    if up:
        yield Tile("Sent up", bytes_text(up), "" if down is None else f"{bytes_text(down)} down")
    missed, rejected = total(story, "missed", "missing"), total(story, "turned", "rejected")
    if took is not None or missed or rejected:
        yield Tile("Missing", counted(int(missed or 0), "time"), f"{int(rejected or 0):,} turned away")


def privacy_tile(spent: Privacy) -> Tile:
    delta = "" if spent.delta is None else f"delta {short(spent.delta)}"
    if spent.budget is None:
        return Tile("Epsilon", loss_text(spent.spent), delta)
    share = spent.spent / spent.budget if spent.budget > 0 else 1.0
    bar = strip(spent.text, [(0, min(1.0, max(0.0, share)), "alert" if spent.over else "optimizer")])
    of = f"{'above' if spent.over else 'of'} {short(spent.budget)}"
    return Tile("Epsilon", loss_text(spent.spent), f"{of}, {delta}" if delta else of, spent.over, bar)
