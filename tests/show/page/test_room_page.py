"""What rooms have on pages: a room that fails costs its own part, and its name decides whose part that is."""

from __future__ import annotations

from typing import Any

import pytest

from shoestring.core.rooms import RoomPlugin
from shoestring.runs.reports.report import Report
from shoestring.show.page import page, room_page
from shoestring.show.page.overview import curves, overview, summary
from shoestring.show.page.room_page import PLAIN, RoomPage, page_of
from tests.show.made_reports import made_report
from tests.show.page.test_document import full


class Pond(RoomPlugin):
    name, counts = "frog", "leap"


class Broken(RoomPage[Any]):
    def flags(self, own: Any) -> Any:
        raise RuntimeError("flags")

    def sections(self, own: Any, report: Any) -> Any:
        yield "first"
        raise SystemExit("<b>sections</b>")

    tiles = cells = lines = flags

    def ending(self, own: Any, why: str) -> Any:
        raise RuntimeError("ending")


class Misfit(RoomPage[Any]):
    """Gives values of another kind than it is asked for."""

    def flags(self, own: Any) -> Any:
        return "flags"

    def sections(self, own: Any, report: Any) -> Any:
        return [42]

    def whole(self, own: Any) -> Any:
        return 42

    def cells(self, own: Any) -> Any:
        return ["cell"]

    tiles = lines = cells

    def ending(self, own: Any, why: str) -> Any:
        return 42


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> RoomPage[Any]:
    found = Broken(Pond())
    monkeypatch.setattr(room_page, "pages", lambda: {"frog": found})
    return found


def test_a_room_that_fails_takes_no_page_down_and_is_told_of(broken: RoomPage[Any]) -> None:
    story = made_report(full() | {"room": "frog", "state": "finished"})
    drawn = page(story)
    assert "Broken can't be shown: SystemExit: &lt;b&gt;sections&lt;/b&gt;" in drawn.replace("&#39;", "'")
    assert "leaps" in drawn and "Predicted" in drawn
    assert "1 run" in overview([summary(story, "run")]) and "training loss" in curves(story)


def test_a_room_that_gives_values_of_another_kind_takes_no_page_down_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_page, "pages", lambda: {"frog": Misfit(Pond())})
    story = made_report(full() | {"room": "frog", "state": "finished"})
    drawn = page(story).replace("&#39;", "'")
    assert "Misfit can't be shown: TypeError: it gave a int, not text" in drawn and "Predicted" in drawn
    assert "1 run" in overview([summary(story, "run")]) and "training loss" in curves(story)


@pytest.mark.parametrize("given", [42, type("Styled", (RoomPage,), {"style": None})(Pond())], ids=["number", "style"])
def test_a_room_whose_page_is_none_has_that_of_every_room(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pond = type("Odd", (Pond,), {"page": lambda self: given})()
    monkeypatch.setattr(room_page, "installed_rooms", lambda: (pond,))
    room_page.pages.cache_clear()
    try:
        assert room_page.style_of_rooms() == "" and type(page_of(made_report({"room": "frog"}))) is RoomPage
    finally:
        room_page.pages.cache_clear()


def test_a_report_is_of_the_room_that_its_request_names(broken: RoomPage[Any]) -> None:
    assert page_of(made_report({"room": "frog"})) is broken
    for report in (Report(), made_report({"room": "toad"}), made_report({})):
        assert page_of(report) is PLAIN
