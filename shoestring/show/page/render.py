"""Templates filled with values. Whatever is put into one is text and never markup: it is escaped unless it came out of a template."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from shoestring.core.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from jinja2 import Environment

NONE = "\N{EN DASH}"  # in place of a figure that is missing


def render(template: str, **values: object) -> Markup:
    """A template of this package as markup."""
    return Markup(environment().get_template(template).render(**values))


@cache
def environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("shoestring.show.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        keep_trailing_newline=False,
    )
    made.filters |= {
        "said": said,
        "glued": glued,
        "bytes": bytes_text,
        "seconds": seconds_text,
        "known_bytes": lambda size: NONE if size is None else bytes_text(size),
        "known_seconds": lambda seconds: NONE if seconds is None else seconds_text(seconds),
        "thousands": lambda count: f"{count:,.0f}",
    }
    return made


def compile_all() -> None:
    for name in environment().list_templates():
        environment().get_template(name)


def said(text: object, most: int = 300) -> Markup:
    """Text that can't be markup, cut to `most` bytes.

    >>> str(said("<b>")), str(said("a" * 20, most=5)), str(said("1 & 2", most=4)), str(said(said("<b>")))
    ('&lt;b&gt;', 'aaaaa…', '1 …', '&lt;b&gt;')
    """
    if isinstance(text, Markup):
        return text
    safe = str(escape(str(text)[: most + 1])).encode("utf-8", "replace")  # half a character can't be written to a file
    cut = safe[:most].decode(errors="ignore")
    return Markup(cut if len(safe) <= most else re.sub(r"&[^;]*$", "", cut) + "…")


def glued(text: object) -> Markup:
    """Text in which a number and its unit stay on one line.

    >>> str(glued("at most 531 MiB, 2 layers"))
    'at most 531&nbsp;MiB, 2 layers'
    """
    return Markup(re.sub(r"(?<=\d) (?=(?:[KMG]i)?B\b|m?s\b|min\b|h\b|%)", "&nbsp;", str(escape(text))))
