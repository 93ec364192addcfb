"""Compression as a room: what it supplies to the code that all rooms share."""

from __future__ import annotations

from shoestring.core.command_line.command import Command, ExportFormat
from shoestring.core.rooms import RoomPlugin, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from shoestring.compression.report.compress_report import CompressReport
    from shoestring.compression.report.page import CompressionPage
    from shoestring.runs.events.history import History
    from shoestring.runs.folder import Folder
    from shoestring.runs.request import Request

JOBS = "The job's own arguments are flags too: name the job before --help to see them."


class CompressionPlugin(RoomPlugin):
    name: ClassVar[str] = "compression"
    verb: ClassVar[Verb] = Verb("compress", "compressing", "compressed")
    place: ClassVar[int] = 30

    def commands(self) -> tuple[Command, ...]:
        return (
            Command(
                "distill",
                "train a student towards its teachers' outputs",
                "shoestring.compression.distillation.options:DistillCommand",
                "shoestring.compression.distillation.command:run",
                JOBS,
                job_flags=True,
                keeps_result=True,
                runs=True,
            ),
            Command(
                "compress",
                "make a model smaller or faster, within limits on size, latency and quality",
                "shoestring.compression.arguments:CompressCommand",
                "shoestring.compression.command:run",
                JOBS,
                job_flags=True,
                keeps_result=True,
            ),
        )

    def exports(self) -> tuple[ExportFormat, ...]:
        of_numbers, of_whole_numbers = (
            f"shoestring.compression.onnx.of_run:export_{kind}" for kind in ("floats", "int8")
        )
        return (
            ExportFormat("onnx", "a file for onnxruntime", ".onnx", of_numbers),
            ExportFormat("onnx-int8", "the same with products of whole numbers", "-int8.onnx", of_whole_numbers),
        )

    def page(self) -> CompressionPage:
        from shoestring.compression.report.page import CompressionPage

        return CompressionPage(self)

    def part(self, request: Request, history: History, folder: Folder) -> CompressReport | None:
        from shoestring.compression.report.compress_report import CompressReport
        from shoestring.core.files.codec import finite_json, from_json
        from shoestring.runs.events.event import Finished

        if not isinstance(history.doing, Finished):
            return None
        told = finite_json(folder.read("report.json"))
        return from_json(CompressReport, told, unknown="ignored") if told else None


COMPRESSION = CompressionPlugin()
