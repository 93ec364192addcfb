"""What compression brings to the code that all rooms share."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoestring.core.rooms import RoomPlugin

if TYPE_CHECKING:
    from shoestring.compression.compress_report import CompressReport
    from shoestring.runs.folder import Folder
    from shoestring.runs.history import History
    from shoestring.runs.request import Request


class CompressionPlugin(RoomPlugin):
    name: ClassVar[str] = "compression"

    def part(self, request: Request, history: History, folder: Folder) -> CompressReport | None:
        from shoestring.compression.compress_report import CompressReport
        from shoestring.core.codec import finite_json, from_json
        from shoestring.runs.event import Finished

        if not isinstance(history.doing, Finished):
            return None
        told = finite_json(folder.read("report.json"))
        return from_json(CompressReport, told, unknown="ignored") if told else None


COMPRESSION = CompressionPlugin()
