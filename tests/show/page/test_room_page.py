"""What rooms have on pages: a room that fails costs its own part, and its name decides whose part that is."""

from __future__ import annotations

from typing import Any

import pytest

from shoestring.core.rooms import RoomPlugin
from shoestring.show.page import page, room_page
from shoestring.show.page.overview import curves, overview, summary
from shoestring.show.page.room_page import PLAIN, RoomPage, page_of
from tests.show.page.test_document import full


class Pond(RoomPlugin):
    name, counts = "frog", "leap"


class Broken(RoomPage):
    def flags(self, story: Any) -> Any:
        raise RuntimeError("flags")

    def sections(self, story: Any) -> Any:
        yield "first"
        raise SystemExit("<b>sections</b>")

    tiles = cells = lines = flags

    def ending(self, story: Any, why: str) -> Any:
        raise RuntimeError("ending")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> RoomPage:
    found = Broken(Pond())
    monkeypatch.setattr(room_page, "pages", lambda: {"frog": found})
    return found


def test_a_room_that_fails_takes_no_page_down_and_is_told_of(broken: RoomPage) -> None:
    story = full() | {"room": "frog", "state": "finished"}
    drawn = page(story)
    assert "Broken can't be shown: SystemExit: &lt;b&gt;sections&lt;/b&gt;" in drawn.replace("&#39;", "'")
    assert "leaps" in drawn and "Predicted" in drawn
    assert "1 run" in overview([summary(story, "run")]) and "training loss" in curves(story)


def test_a_report_that_does_not_name_its_room_is_of_that_under_whose_name_it_has_something(broken: RoomPage) -> None:
    assert page_of({"frog": {}}) is broken and page_of({"room": "frog"}) is broken
    for story in ({}, {"frog": 3}, {"room": "toad", "frog": {}}, {"room": ["toad"]}):
        assert page_of(story) is PLAIN
