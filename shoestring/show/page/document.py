"""One HTML document around what stands inside <main>."""
from __future__ import annotations

from markupsafe import Markup

from shoestring.show.page.render import render
from shoestring.show.page.style import STYLE


def document(title: str, content: Markup, events: str = "", name: str = "", script: str = "") -> str:
    """The report; with `events`, the address to listen to, the live page, and with `name` a way back to all runs."""
    return str(render("document.html", title=title, content=content, events=events, name=name, style=Markup(STYLE), script=Markup(script)))
