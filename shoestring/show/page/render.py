"""Fill templates with values. Values are escaped, unless they are the output of another template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from shoestring.core.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from jinja2 import Environment

NONE = "\N{EN DASH}"  # for a missing figure
OURS = "shoestring.show.page"


def render(template: str, **values: object) -> Markup:
    """A function that fills a template of this package."""
    return Markup(environment(OURS).get_template(template).render(**values))


def renderer(package: str) -> Callable[..., Markup]:
    """The same for templates of another package, which may import ours."""

    def render_template(template: str, **values: object) -> Markup:
        return Markup(environment(package).get_template(template).render(**values))

    return render_template


@cache
def environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(one) for one in dict.fromkeys((package, OURS))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        keep_trailing_newline=False,
    )
    made.filters |= {
        "said": escape_cut,
        "glued": with_unbreakable_spaces,
        "bytes": bytes_text,
        "seconds": seconds_text,
        "known_bytes": lambda size: NONE if size is None else bytes_text(size),
        "known_seconds": lambda seconds: NONE if seconds is None else seconds_text(seconds),
        "thousands": lambda count: f"{count:,.0f}",
    }
    return made


def compile_all(packages: Iterable[str] = ()) -> None:
    """Compile all templates of this package and of these."""
    for package in (OURS, *packages):
        for name in environment(package).list_templates():
            environment(package).get_template(name)


def escape_cut(text: object, most: int = 300) -> Markup:
    """Escaped text, cut to `most` bytes.

    >>> str(escape_cut("<b>")), str(escape_cut("a" * 20, most=5)), str(escape_cut("1 & 2", most=4)), str(escape_cut(escape_cut("<b>")))
    ('&lt;b&gt;', 'aaaaa…', '1 …', '&lt;b&gt;')
    """
    if isinstance(text, Markup):
        return text
    safe = str(escape(str(text)[: most + 1])).encode(
        "utf-8", "replace"
    )  # cut characters, not bytes: half a character can't be written
    cut = safe[:most].decode(errors="ignore")
    return Markup(cut if len(safe) <= most else re.sub(r"&[^;]*$", "", cut) + "…")


def with_unbreakable_spaces(text: object) -> Markup:
    """Text with unbreakable spaces between numbers and units.

    >>> str(with_unbreakable_spaces("at most 531 MiB, 2 layers"))
    'at most 531&nbsp;MiB, 2 layers'
    """
    return Markup(re.sub(r"(?<=\d) (?=(?:[KMG]i)?B\b|m?s\b|min\b|h\b|%)", "&nbsp;", str(escape(text))))
