"""An extension of griffe, which reads docstrings for mkdocstrings: their columns stay columns, as on the pages of techniques."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.append(str(Path(__file__).parent))

from docstring_markdown import markdown


class Columns(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
