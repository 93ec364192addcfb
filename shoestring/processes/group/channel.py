"""Messages from a group's workers to their launcher: a socket in a private folder, one message per line, with the
worker's rank."""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shoestring.processes.messages import Heartbeat, Message, message_text, read_message

BEAT = 0.5  # seconds between heartbeats
PEER_LOST = 75  # exit code of a worker that lost another worker, or its launcher


class Receiver:
    """The launcher's end."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(1024)
        self.server.setblocking(False)
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.server, selectors.EVENT_READ)
        self.halves: dict[socket.socket, bytes] = {}  # per worker: the beginning of an incomplete line

    def receive(self) -> Iterator[tuple[int, Message]]:
        """New messages: each worker's rank and message."""
        while found := self.ready.select(0):
            for key, _ in found:
                if key.fileobj is self.server:
                    worker, _ = self.server.accept()
                    self.ready.register(worker, selectors.EVENT_READ)
                    self.halves[worker] = b""
                    continue
                assert isinstance(key.fileobj, socket.socket), "only sockets were registered"
                yield from self.messages_from(key.fileobj)

    def messages_from(self, worker: socket.socket) -> Iterator[tuple[int, Message]]:
        try:
            data = worker.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self.halves[worker] = (self.halves[worker] + data).split(b"\n")
        for line in lines:
            rank, message = line.split(b" ", 1)
            yield int(rank), read_message(message)
        if not data:
            self.ready.unregister(worker)
            worker.close()
            del self.halves[worker]

    def close(self) -> None:
        for one in (*self.halves, self.server):
            one.close()
        self.ready.close()


class Sender:
    """A worker's end. It sends heartbeats from a thread of its own."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.turn = threading.Lock()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        threading.Thread(target=self.beat, daemon=True).start()

    def send(self, message: Message) -> None:
        with self.turn:
            self.socket.sendall(f"{json.dumps(self.rank)} {message_text(message)}\n".encode())

    def beat(self) -> None:
        while True:
            try:
                self.send(Heartbeat())
            except OSError:  # the launcher is gone
                os._exit(PEER_LOST)
            time.sleep(BEAT)
