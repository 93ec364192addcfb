"""A worker that says nothing for too long, in a task whose answer somebody waits for.

Training in a folder may take as long as it likes: its line of progress tells since when nothing came. Other tasks, by
which plans are made and compared, take seconds or a few minutes, so one of them that is silent for half an hour is
ended, with the line of the job at which it stands. To find that, the worker is asked for its stack by a signal
(faulthandler, which also works while C code runs).
"""

from __future__ import annotations

import faulthandler
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from traceback import FrameSummary
from typing import IO, Any

from shoestring.core.errors import Mistake
from shoestring.core.units import about, parse_seconds
from shoestring.processes.task import Task

VARIABLE = "SHOESTRING_DEADLINE"  # of the environment, such as 2h; for tasks that need longer
DEADLINE = "30m"
ASK = signal.SIGUSR1
PRINT = 5.0  # seconds in which an asked worker must have printed its stack
LEAVE = 60.0  # seconds in which a worker that is done must end
PLACE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class NoAnswer(Mistake):
    """A task was given up, because its worker was silent until the deadline."""


class Silence(Exception):
    """Nothing came until the deadline."""


def deadline_of(task: Task[Any]) -> float | None:
    """Longest time in seconds in which a task's worker may be silent; None: as long as it lives."""
    try:
        return None if task.run_folder else parse_seconds(os.environ.get(VARIABLE, DEADLINE))
    except Mistake as error:
        raise Mistake(f"the environment's {VARIABLE}: {error}") from None


def answer_when_asked() -> None:
    """In a worker: print the stack when asked, and end."""
    faulthandler.register(ASK, all_threads=False, chain=True)


def readable(file: int, seconds: float | None) -> bool:
    """Whether there is something to read, or the end, before so many seconds have passed."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def lines_in_time(
    file: int, deadline: float | None, wait: Callable[[int, float | None], bool] = readable
) -> Iterator[bytes]:
    """The lines that a pipe brings, to its end. Raises Silence after `deadline` seconds in which nothing came."""
    rest = bytearray()
    while wait(file, deadline):
        found = os.read(file, 1 << 16)
        rest += found
        if b"\n" in found:
            *lines, rest = rest.split(b"\n")
            yield from map(bytes, lines)
        if not found:
            return
    raise Silence


def no_answer(task: Task[Any], place: str = "") -> NoAnswer:
    deadline = deadline_of(task) or 0.0
    stands = f", and the job stands in {place}" if place else ""
    return NoAnswer(
        f"no result came for {about(deadline)}{stands}: see what it waits for there, or give it longer, such as "
        f"{VARIABLE}={-(-2 * deadline // 60):.0f}m in the environment"
    )


def see_out(child: subprocess.Popen[str]) -> None:
    """Wait for a worker that has closed its pipe. One that does not end, because of a thread or a hook of the job, is
    killed: it is done."""
    try:
        child.wait(LEAVE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def standing_place(child: subprocess.Popen[str], says: IO[bytes]) -> str:
    """The line of the job at which a worker stands, by the stack that it prints into `says`; empty if it can't tell."""
    before = os.fstat(says.fileno()).st_size
    with suppress(subprocess.TimeoutExpired, ProcessLookupError):
        child.send_signal(ASK)
        child.wait(PRINT)
    says.seek(before)
    return place_in(says.read().decode(errors="replace"))


def place_in(stack: str) -> str:
    """The user's innermost line in what faulthandler printed."""
    from shoestring.core.user_code.blame import Frame, blame

    frames = [Frame(FrameSummary(file, int(number), name)) for file, number, name in PLACE.findall(stack)]
    found = blame(frames[::-1])
    return "" if found.ours or not frames else found.place
