"""What compression brings to the code that all rooms share."""

from __future__ import annotations

from typing import ClassVar

from shoestring.core.rooms import RoomPlugin


class CompressionPlugin(RoomPlugin):
    name: ClassVar[str] = "compression"


COMPRESSION = CompressionPlugin()
