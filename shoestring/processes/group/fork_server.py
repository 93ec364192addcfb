"""The fork server: a process that has imported torch and forks the workers of a group. This is the launcher's side.

    imported once    4 s of a core, 210 MB          fresh processes would pay this per worker, and again after every death
    a worker         0.05 s, a few MB of its own    workers share the memory that they do not change

Workers end with the fork server, and it ends with its launcher, however that ends. All of them hold the lock of the
run's folder. Why multiprocessing's fork server is not used: decisions/014.
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

READY = 120.0  # time to import torch


class ForkServer:
    """Requests workers and learns how they ended."""

    def __init__(self, environment: Mapping[str, str], private: Path, lock: int | None, room: str) -> None:
        """`room`: the room of the workers' tasks."""
        self.environment, self.private, self.lock, self.room = environment, private, lock, room
        self.codes: dict[int, int] = {}  # exit codes of ended workers
        self.alive: set[int] = set()
        self.half = b""  # the beginning of an incomplete line
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
        """Start a worker with these environment variables; returns its pid."""
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
        """Read who started and who ended."""
        while select.select([self.line], [], [], seconds)[0]:
            seconds = 0.0
            try:
                data = self.line.recv(1 << 16)
            except OSError:
                data = b""
            if not data:  # the fork server died, and all workers with it
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(1)
                self.codes |= dict.fromkeys(self.alive, -signal.SIGKILL)
                self.alive.clear()
                return
            *lines, self.half = (self.half + data).split(b"\n")
            for pid, code in map(json.loads, lines):  # a worker started, or ended with this code
                if code is None:
                    self.alive.add(pid)
                else:
                    self.alive.discard(pid)
                    self.codes[pid] = code

    def code(self, pid: int) -> int | None:
        """A worker's exit code; None while it runs."""
        return self.codes.get(pid)

    def end(self, pids: Iterable[int], seconds: float = 5.0) -> None:
        """Kill workers with all their children, and wait until they are gone."""
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
