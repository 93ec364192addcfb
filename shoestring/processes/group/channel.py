"""What workers of a group say to their launcher: a socket in a private folder, a JSON object a line, with the rank of who speaks."""
from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEAT = 0.5      # seconds between heartbeats
CASUALTY = 75   # exit code of a worker that lost another one, or its launcher


class Ears:
    """The launcher's end."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(1024)
        self.server.setblocking(False)
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.server, selectors.EVENT_READ)
        self.halves: dict[socket.socket, bytes] = {}   # of lines whose end is not here yet

    def heard(self) -> Iterator[dict[str, Any]]:
        """What was said since the last time."""
        while found := self.ready.select(0):
            for key, _ in found:
                if key.fileobj is self.server:
                    speaker, _ = self.server.accept()
                    self.ready.register(speaker, selectors.EVENT_READ)
                    self.halves[speaker] = b""
                    continue
                assert isinstance(key.fileobj, socket.socket), "only sockets were registered"
                yield from self.said(key.fileobj)

    def said(self, speaker: socket.socket) -> Iterator[dict[str, Any]]:
        try:
            data = speaker.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self.halves[speaker] = (self.halves[speaker] + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
        if not data:
            self.ready.unregister(speaker)
            speaker.close()
            del self.halves[speaker]

    def close(self) -> None:
        for speaker in (*self.halves, self.server):
            speaker.close()
        self.ready.close()


class Voice:
    """A worker's end."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.turn = threading.Lock()
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(str(path))
        threading.Thread(target=self.beat, daemon=True).start()

    def send(self, event: Mapping[str, Any]) -> None:
        with self.turn:
            self.line.sendall(json.dumps({"rank": self.rank} | dict(event)).encode() + b"\n")

    def beat(self) -> None:
        while True:
            try:
                self.send({"event": "beat"})
            except OSError:   # the launcher is gone
                os._exit(CASUALTY)
            time.sleep(BEAT)
