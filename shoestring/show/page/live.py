"""The page while it is watched: the same page, and a script that puts in what the server sends (script/live.js)."""

from __future__ import annotations

from markupsafe import Markup

from shoestring.show.page.document import document, script
from shoestring.show.page.room_page import style_of_rooms
from shoestring.show.page.style import STYLE

SCRIPT = script("charts.js", "runs.js", "live.js")


def live(title: str, content: Markup, events: str, name: str = "") -> str:
    """A page that listens to `events`; with a way back to all runs if it is that of the run `name` among others."""
    return document(title, content, events, name, SCRIPT, STYLE + style_of_rooms())
