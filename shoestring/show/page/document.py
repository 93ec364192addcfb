"""One HTML document around what stands inside <main>: style and script are inside it, and its policy allows no others."""

from __future__ import annotations

import re
from pathlib import Path

from markupsafe import Markup

from shoestring.show.page.render import render
from shoestring.show.page.style import STYLE
from shoestring.web.guard import hash_of


def script(*names: str) -> str:
    """Files of script/ as one script for a page, without their comments and the spaces at the beginning of lines."""
    text = "".join((Path(__file__).parent / "script" / name).read_text(encoding="utf-8") for name in names)
    shorter = re.sub(r"^\s*(//.*)?\n|^ +", "", re.sub(r"   // .*$", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return f'(() => {{"use strict";\n{shorter}}})();\n'


CHARTS = script("charts.js")


def document(
    title: str, content: Markup, events: str = "", name: str = "", script: str = CHARTS, style: str = STYLE
) -> str:
    """The report; with `events`, the address to listen to, the live page, and with `name` a way back to all runs.

    A server of ours sends its policy with every answer. A report is a file, so it carries its own.
    """
    policy = (
        ""
        if events
        else (
            f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(script)}; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        )
    )
    return str(
        render(
            "document.html",
            title=title,
            content=content,
            events=events,
            name=name,
            policy=Markup(policy),
            style=Markup(style),
            script=Markup(script),
        )
    )
