"""The live page: the same page, with a script that inserts what the server sends (script/live.js)."""

from __future__ import annotations

from markupsafe import Markup

from shoestring.show.page.document import document, script
from shoestring.show.page.room_page import style_of_rooms
from shoestring.show.page.style import STYLE

SCRIPT = script("charts.js", "runs.js", "live.js")


def live(title: str, content: Markup, events: str, name: str = "") -> str:
    """A page that listens to `events`; `name`: one run of several, with a link back to all."""
    return document(title, content, events, name, SCRIPT, STYLE + style_of_rooms())
