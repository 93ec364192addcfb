"""Child processes: the worker that trains, started with the environment that the plan and the machine ask for.

The worker has a process group of its own, so that Ctrl-C reaches the launcher alone: it asks the worker to stop, which then saves and
ends; asked a second time, it kills it. If the launcher dies, the worker notices at its next step that nobody listens, saves and ends.
"""
from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from shoestring.core.errors import Mistake


class Crashed(RuntimeError):
    """A worker ended without an answer, or with a fault of our own."""


class OutOfMemory(Mistake):
    """A worker ran out of memory, by its own word or by the kernel's."""


def run_worker(task: Mapping[str, Any], environment: Mapping[str, str],
               on_event: Callable[[dict[str, Any]], None] = lambda event: None, lock: int | None = None,
               on_stop: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Do a task in a child process; its events go to `on_event`, its result comes back. The worker shares the `lock` it is given.

    `on_stop` is called when the worker has been asked to stop.
    """
    kills = memory_kills()
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "shoestring.processes.worker", str(writer)], stdin=subprocess.PIPE, stdout=sys.stderr,
        env=os.environ | dict(environment), pass_fds=(writer,) if lock is None else (writer, lock), text=True, process_group=0,
    )
    os.close(writer)
    assert child.stdin is not None, "the pipe was asked for"
    last: dict[str, Any] = {}
    asked: list[int] = []
    try:
        child.stdin.write(json.dumps(task))
        child.stdin.close()
        with os.fdopen(reader) as lines, politely(child, asked, on_stop) if "folder" in task else nullcontext():
            for line in lines:
                event = json.loads(line)
                if event["event"] in ("result", "mistake", "fault", "out of memory"):
                    last = event
                else:
                    on_event(event)
            child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise
    kind = last.get("event")
    if kind == "mistake":
        raise Mistake(last["text"])
    if kind == "fault":
        raise Crashed(last["text"])
    if kind == "out of memory":
        raise OutOfMemory(last["text"])
    if kind is None and child.returncode == -signal.SIGKILL and memory_kills() > kills:
        raise OutOfMemory("the kernel killed its process when the machine ran out of memory")
    if kind is None and asked and child.returncode == -signal.SIGTERM:   # asked to stop before it could listen
        return {"stopped": 0}
    if kind is None:
        raise Crashed(ending(child.returncode))
    return last


def memory_kills() -> int:
    """How many processes the kernel has killed for want of memory, here and in this container."""
    count = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError):
            lines = Path(path).read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return count


class Child(Protocol):
    def send_signal(self, sig: int) -> None: ...


@contextmanager
def politely(child: Child, asked: list[int], on_stop: Callable[[], None]) -> Iterator[None]:
    """While inside, a signal to stop is passed on and noted: the first lets the worker save, the second kills it."""

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 1:
            on_stop()
        child.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        if len(asked) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending(code: int) -> str:
    """What a worker's exit code means."""
    why, more = reason(code)
    return f"the worker process died with {why}: {more}" if code < 0 else f"the worker process ended with {why} and no result"


def reason(code: int) -> tuple[str, str]:
    """How a process ended, and what that may mean."""
    if code >= 0:
        return f"exit code {code}", ""
    name = signal.Signals(-code).name
    return name, {"SIGKILL": "somebody killed it",
                  "SIGILL": "the processor can't run an instruction that it advertises: run shoestring doctor",
                  "SIGSEGV": "a native library crashed"}.get(name, "it was stopped from outside")


def fingerprint(file: str) -> dict[str, str]:
    """What must be the same for every worker of a group."""
    import torch

    from shoestring import __version__

    return {"job file": hashlib.sha256(Path(file).read_bytes()).hexdigest(), "shoestring": __version__, "torch": torch.__version__}
