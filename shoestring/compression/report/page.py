"""What a compression has on its live page, and in the overview of several runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from markupsafe import Markup

from shoestring.compression.report.amounts import fidelity_text, size_text
from shoestring.compression.report.compress_report import CompressReport
from shoestring.compression.report.page_style import STYLE_OF_COMPRESSION
from shoestring.compression.report.sections import compression_content
from shoestring.show.page.room_page import Cell, RoomCell, RoomPage


class CompressionPage(RoomPage[CompressReport | None]):
    """Once there is a model its page is that of the model, and before that of the run."""

    plans_memory: ClassVar[bool] = False
    style: ClassVar[str] = STYLE_OF_COMPRESSION
    templates: ClassVar[str] = "shoestring.compression"

    def whole(self, own: CompressReport | None) -> Markup | None:
        return None if own is None else compression_content(own)

    def cells(self, own: CompressReport | None) -> Iterator[RoomCell]:
        size, fidelity = (None, None) if own is None else (own.size_bytes.best_known, own.fidelity.mean.best_known)
        yield RoomCell("Size", Cell() if size is None else Cell(size_text(size), size))
        yield RoomCell("Fidelity", Cell() if fidelity is None else Cell(fidelity_text(fidelity), fidelity), "down")
