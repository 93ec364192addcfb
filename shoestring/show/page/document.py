"""The HTML document around the inside of <main>, with style and script inline; its content policy allows no others."""

from __future__ import annotations

import re
from pathlib import Path

from markupsafe import Markup

from shoestring.show.page.render import render
from shoestring.show.page.style import STYLE
from shoestring.web.guard import hash_of


def script(*names: str) -> str:
    """Files of script/ joined into one, without comments and indentation."""
    text = "".join((Path(__file__).parent / "script" / name).read_text(encoding="utf-8") for name in names)
    shorter = re.sub(r"^\s*(//.*)?\n|^ +", "", re.sub(r"   // .*$", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return f'(() => {{"use strict";\n{shorter}}})();\n'


CHARTS = script("charts.js")


def document(
    title: str, content: Markup, events: str = "", name: str = "", script: str = CHARTS, style: str = STYLE
) -> str:
    """The report; with `events`, the address of server-sent events, the live page, and with `name` a link back to all
    runs.

    Our server sends the content policy in headers. A report is a file, so it contains the policy.
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
