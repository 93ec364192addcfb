"""Docstrings as Markdown, for the documentation site."""

from __future__ import annotations

import re
from textwrap import indent


def markdown(docstring: str) -> str:
    """A docstring in which paragraphs whose words stand in columns become blocks of code, so that they keep them.

    >>> print(markdown("Sent:\\n\\nkind    bytes\\nfp16    2"))
    Sent:
    <BLANKLINE>
        kind    bytes
        fp16    2
    """
    paragraphs = docstring.split("\n\n")
    aligned = (re.search(r"^ {0,3}\S.*\S {3,}\S", one, flags=re.MULTILINE) for one in paragraphs)
    return "\n\n".join(
        indent(one, "    ") if columns else one for one, columns in zip(paragraphs, aligned, strict=True)
    )
