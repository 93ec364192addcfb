"""The fork server: a process that has imported torch, of which the workers of a group are forks. The launcher's side.

    imported once    4 s of a core, 210 MB          fresh processes would pay that for every worker, and again after every death
    a worker         0.05 s, a few MB of its own    what workers do not change of that memory, they share

Workers end with the fork server, and that ends with its launcher, however it ends. All of them hold the lock of the run's folder.
Why multiprocessing's own is not used: decisions/014.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from shoestring.core.errors import Crashed
from shoestring.processes.launch import ending_text, error_stream

READY = 120.0  # seconds in which torch must have been imported


class ForkServer:
    """Asks for workers and learns how they ended."""

    def __init__(self, environment: Mapping[str, str], private: Path, lock: int | None, room: str) -> None:
        """`room`: whose tasks the workers do."""
        self.environment, self.private, self.lock, self.room = environment, private, lock, room
        self.codes: dict[int, int] = {}  # of those that ended
        self.alive: set[int] = set()
        self.half = b""  # the beginning of a line whose end is not here yet
        self.start()

    def start(self) -> None:
        self.line, other = socket.socketpair()
        with other:
            kept = (other.fileno(),) if self.lock is None else (other.fileno(), self.lock)
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "shoestring.processes.group.fork_server_main",
                    str(other.fileno()),
                    str(os.getpid()),
                    str(self.private),
                    self.room,
                ],
                stdin=subprocess.DEVNULL,
                stdout=error_stream(),
                env=os.environ | dict(self.environment),
                pass_fds=kept,
                start_new_session=True,
            )

    def fork(self, environment: Mapping[str, str]) -> int:
        """A new worker with these variables; gives its pid."""
        if self.process.poll() is not None:
            self.line.close()
            self.start()
        before = set(self.alive)
        with suppress(OSError):
            self.line.sendall(json.dumps(dict(environment)).encode() + b"\n")
        until = time.monotonic() + READY
        while not self.alive - before:
            if self.process.poll() is not None:
                raise Crashed(ending_text(self.process.returncode))
            if time.monotonic() > until:
                raise Crashed(
                    f"a worker process could not be made within {READY:.0f} s: the machine is too busy, or its disk too slow"
                )
            self.listen(0.1)
        return (self.alive - before).pop()

    def listen(self, seconds: float = 0.0) -> None:
        """Hear who began and who ended."""
        while select.select([self.line], [], [], seconds)[0]:
            seconds = 0.0
            try:
                data = self.line.recv(1 << 16)
            except OSError:
                data = b""
            if not data:  # the fork server is gone, and all workers with it
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(1)
                self.codes |= dict.fromkeys(self.alive, -signal.SIGKILL)
                self.alive.clear()
                return
            *lines, self.half = (self.half + data).split(b"\n")
            for pid, code in map(json.loads, lines):  # a worker began, or ended with this code
                if code is None:
                    self.alive.add(pid)
                else:
                    self.alive.discard(pid)
                    self.codes[pid] = code

    def code(self, pid: int) -> int | None:
        """How a worker ended; None while it lives."""
        return self.codes.get(pid)

    def end(self, pids: Iterable[int], seconds: float = 5.0) -> None:
        """Kill workers, with all they started, and wait until they are gone."""
        wanted, until = set(pids), time.monotonic() + seconds
        for pid in wanted:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        while wanted & self.alive and time.monotonic() < until:
            self.listen(0.05)

    def close(self) -> None:
        self.end(self.alive)
        self.process.kill()
        self.process.wait()
        self.line.close()
