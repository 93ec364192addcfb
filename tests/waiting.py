"""How tests wait: for something that the tested process does itself, never for a time to pass.

`until` looks again and again. Its deadline only ever ends a test whose subject hangs: a machine ten times slower passes all the same.
Gates stop a job in another process where a test wants it, for as long as it wants:

    job file    PASS_GATE + "... pass_gate(folder, number) ..."    stands still while the test holds the gate of that number
    test        with Gates(folder, 9) as gates: ...; gates.open(9)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import os
import socket
import time
from collections.abc import Awaitable, Callable
from inspect import getsource
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

HUNG = 300.0  # seconds after which whatever a test waits for will not come any more
LOOK = 0.01  # seconds between two looks


def pass_gate(folder: str, number: int) -> None:
    """Wait while a test holds the gate with this number; where there is no such gate, or no run in the folder has begun to train, go on:
    planning looks at the data too."""
    path = os.path.join(folder, f"gate-{number}")
    if folder and os.path.exists(path):
        events = [name for place in ("", "*") for name in glob.glob(os.path.join(folder, place, "events.jsonl"))]
        if any('"begun"' in open(name).read() for name in events):  # noqa: SIM115
            with contextlib.suppress(FileNotFoundError), open(path) as file:  # it was opened since we looked
                fcntl.flock(file, fcntl.LOCK_SH)


def until_exists(path: str) -> None:
    """Wait for a file that another process makes."""
    while not os.path.exists(path):
        time.sleep(0.01)


PASS_GATE = f"import contextlib, fcntl, glob, os\n\n{getsource(pass_gate)}\n"  # for job files, which can't import tests
UNTIL_EXISTS = f"import os, time\n\n{getsource(until_exists)}\n"


def until(found: Callable[[], T], what: str = "it") -> T:
    """Wait until something is true, and give it."""
    end = time.monotonic() + HUNG
    while not (value := found()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen in {HUNG:.0f} s")
        time.sleep(LOOK)
    return value


async def soon(awaited: Awaitable[T]) -> T:
    """Wait for something of an event loop, and give it."""
    return await asyncio.wait_for(awaited, HUNG)


async def until_so(found: Callable[[], T], what: str = "it") -> T:
    """Wait until something is true while an event loop goes on, and give it."""
    end = time.monotonic() + HUNG
    while not (value := found()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen in {HUNG:.0f} s")
        await asyncio.sleep(0)
    return value


def until_gone(pid: int) -> None:
    """Wait until a process has ended, whoever its parent is; a zombie has."""
    until(lambda: state_of(pid) in ("", "Z"), f"the end of process {pid}")


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: R runs, S sleeps, T is suspended, Z has ended; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


class Gates:
    """Gates in a folder, closed until they are opened or the block ends. They are locks of files, so whoever waits uses no time."""

    def __init__(self, folder: Path, *numbers: int) -> None:
        self.folder = folder
        self.held: dict[int, TextIOWrapper] = {}
        for number in numbers:
            self.close(number)

    def close(self, number: int) -> None:
        file = open(self.folder / f"gate-{number}", "w")  # noqa: SIM115
        fcntl.flock(file, fcntl.LOCK_EX)
        self.held[number] = file

    def open(self, number: int) -> None:
        os.unlink(self.folder / f"gate-{number}")  # who comes later finds none
        with self.held.pop(number) as file:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a fork of this process has the file open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in list(self.held):
            self.open(number)


def free_port() -> int:
    """A port for a process that a test starts. The kernel gives none of these to anybody who asks for any port, and test processes that run
    side by side look at different ones first."""
    first = 20_000 + os.getpid() % 400 * 25
    for port in range(first, first + 25):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {first} on")
