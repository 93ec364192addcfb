"""How a server listens, and what it allows a client."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    token: str | None = None  # that clients must send; None: made if others than this machine can reach it; "": none
    hosts: tuple[str, ...] = ()  # more names that it goes by, such as a proxy's
    certificate: str = ""  # file of a TLS certificate chain (PEM), with `key`
    key: str = ""
    memory: int | None = None  # bytes of all models together
    most_body: int = 8 << 20  # bytes of a request
    most_header: int = 16 << 10
    most_rows: int = 1024  # samples in one request
    most_connections: int = 20_000
    request_seconds: float = 20.0  # in which a client must have sent its whole request
    keep_seconds: float = 75.0  # that a connection may stay open between requests
    write_seconds: float = 20.0  # in which a client must take what was sent
    answer_seconds: float = 60.0  # after which a request is answered with 504
    drain_seconds: float = 60.0  # of a graceful stop
    figures_every: float = 10.0  # seconds between figures, while something is served

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise Mistake("TLS needs a certificate and its key: give both files, or none")
        for name in ("most_body", "most_header", "most_rows", "most_connections"):
            if getattr(self, name) < 1:
                raise Mistake(f"{name}={getattr(self, name)} of a server: give 1 or more")
        for name in ("request_seconds", "keep_seconds", "write_seconds", "answer_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise Mistake(f"{name}={getattr(self, name)} of a server: give seconds above 0")
