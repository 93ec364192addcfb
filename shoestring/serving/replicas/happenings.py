"""What happens while models are served: one frozen value a kind, told to whoever serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Happening:
    """The base of all kinds."""

    model: str  # its name; empty: of the whole server


@dataclass(frozen=True)
class ModelLoaded(Happening):
    replicas: int
    memory: int  # bytes of its weights and what else loading it took


@dataclass(frozen=True)
class ModelUnloaded(Happening):
    why: str


@dataclass(frozen=True)
class ModelSwapped(Happening):
    """New weights answer from now on, and those that had the old ones are gone."""


@dataclass(frozen=True)
class ModelProcessDied(Happening):
    """Replicas go on answering while another one loads."""

    how: str


@dataclass(frozen=True)
class LoadFailed(Happening):
    why: str
    again_in: float  # seconds until it is tried again; infinity: it is not


@dataclass(frozen=True)
class ReplicaDied(Happening):
    pid: int
    waiting_again: int  # requests of its batch, that another one will compute
    given_up: int  # requests that are answered with an error, because they killed replicas before


@dataclass(frozen=True)
class BatchComputed(Happening):
    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ServerStarted(Happening):
    url: str
    token: str  # that clients must send; empty: none is needed


@dataclass(frozen=True)
class ServerDraining(Happening):
    """No new connections; what was accepted is answered."""

    unanswered: int


@dataclass(frozen=True)
class ServerStopped(Happening):
    unanswered: int  # requests; 0 after a graceful stop


@dataclass(frozen=True)
class ServedFigures(Happening):
    """What was served since the last figures. Told only where something was."""

    seconds: float
    requests: int
    failures: int
    refused: int
    p50: float  # seconds, from arrival to answer
    p99: float
    queue: int  # requests that wait now
