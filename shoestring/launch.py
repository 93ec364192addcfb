"""Child processes: the worker that trains, started with the environment that the plan and the machine ask for."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shoestring.core.errors import Mistake


class Crashed(RuntimeError):
    """A worker ended without an answer, or with a fault of our own."""


def run_worker(task: Mapping[str, Any], environment: Mapping[str, str],
               on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> dict[str, Any]:
    """Do a task in a child process; its events go to `on_event`, its result comes back."""
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "shoestring.worker", str(writer)], stdin=subprocess.PIPE, stdout=sys.stderr,
        env=os.environ | dict(environment), pass_fds=(writer,), text=True,
    )
    os.close(writer)
    assert child.stdin is not None, "the pipe was asked for"
    result: dict[str, Any] | None = None
    try:
        child.stdin.write(json.dumps(task))
        child.stdin.close()
        with os.fdopen(reader) as lines:
            for line in lines:
                event = json.loads(line)
                if event["event"] == "result":
                    result = event
                elif event["event"] == "mistake":
                    raise Mistake(event["text"])
                elif event["event"] == "fault":
                    raise Crashed(event["text"])
                else:
                    on_event(event)
        child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise
    if result is None:
        raise Mistake(ending(child.returncode))
    return result


def ending(code: int) -> str:
    """What a worker's exit code means."""
    if code >= 0:
        return f"the worker process ended with exit code {code} and no result"
    name = signal.Signals(-code).name
    why = {"SIGKILL": "something killed it, most often the kernel when memory ran out: give less with --memory",
           "SIGILL": "the processor can't run an instruction that it advertises: run shoestring doctor",
           "SIGSEGV": "a native library crashed"}.get(name, "it was stopped from outside")
    return f"the worker process died with {name}: {why}"
