"""What happens in a run of a server beside what happens in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.units import bytes_text
from shoestring.runs.events.event import Event, left_out


@dataclass(frozen=True, kw_only=True)
class Listening(Event):
    """The server answers."""

    kind: ClassVar[str] = "listening"
    url: str  # without its token
    model: str
    replicas: int
    bytes: int  # of all its processes

    def sentence(self) -> str:
        return (
            f"it answers at {self.url}, {self.replicas} replica{'s' * (self.replicas != 1)} in {bytes_text(self.bytes)}"
        )


@dataclass(frozen=True, kw_only=True)
class Served(Event):
    """What was served since the last such event; told only where something was."""

    kind: ClassVar[str] = "served"
    seconds: float
    requests: int
    failures: int = left_out(0)
    refused: int = left_out(0)
    p50: float = 0.0  # seconds
    p99: float = 0.0
    queue: int = left_out(0)


@dataclass(frozen=True, kw_only=True)
class ServerChanged(Event):
    """A process died and was replaced, new weights took over, a model was loaded or unloaded."""

    kind: ClassVar[str] = "server changed"
    text: str

    def sentence(self) -> str:
        return self.text
