"""Child processes: a worker that does one task, with the environment that the plan and the machine need.

The worker has its own process group, so Ctrl-C reaches only the launcher. The launcher asks the worker to stop; it
saves and ends. Asked a second time, the launcher kills it. If the launcher dies, the worker notices at its next step,
saves and ends.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from shoestring.core.errors import Crashed
from shoestring.core.files.codec import from_json
from shoestring.core.running.signals import is_ignored
from shoestring.processes.messages import Answer, Cause, Failure, Happened, OutOfMemory, read_message
from shoestring.processes.signals import stopping_gently
from shoestring.processes.standstill import Silence, deadline_of, lines_in_time, no_answer, see_out, standing_place
from shoestring.processes.streams import closed_files, standard_files
from shoestring.processes.task import JobTask, R, Task, task_text
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.events.event import Event

MOST_SAID = 1 << 16  # bytes of a worker's output that are shown when it failed


def run_worker(
    task: Task[R],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None] = lambda event: None,
    lock: int | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> R:
    """Do a task in a child process; its events go to `on_event`, its result is returned. The worker shares the given
    `lock`.

    `on_stop` is called when the worker was asked to stop. Output of a job that is only measured has been shown before:
    it is shown again only if the worker fails. Raises NoAnswer if the worker was silent for too long.
    """
    with ExitStack() as stack:
        stack.enter_context(standard_files())
        aside = (
            None if task.run_folder else stack.enter_context(os.fdopen(os.memfd_create("what a worker says"), "w+b"))
        )
        return run_child(task, environment, on_event, lock, on_stop, aside)


def run_child(
    task: Task[R],
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    lock: int | None,
    on_stop: Callable[[], None],
    aside: IO[bytes] | None,
) -> R:
    """Do a task in a child process that prints to `aside`, or where we print."""
    kills, deadline = memory_kills(), deadline_of(task)
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "shoestring.processes.worker", str(writer)],
        stdin=subprocess.PIPE,
        stdout=error_stream() if aside is None else aside,
        stderr=aside,
        env=os.environ | dict(environment),
        pass_fds=(writer,) if lock is None else (writer, lock),
        encoding="utf-8",
        process_group=0,
    )
    os.close(writer)
    assert child.stdin is not None, "the pipe was asked for"
    last: Answer | Failure | None = None
    asked: list[int] = []
    try:
        child.stdin.write(task_text(task))
        child.stdin.close()
        stopped = StoppingWorker(child)
        with (
            os.fdopen(reader, "rb") as pipe,
            stopping_gently(stopped, asked, on_stop) if task.run_folder else nullcontext(),
        ):
            for message in map(read_message, lines_in_time(pipe.fileno(), deadline)):
                if isinstance(message, (Answer, Failure)):
                    last = message
                elif isinstance(message, Happened):
                    stopped.listens = True
                    on_event(message.event)
            see_out(child)
    except BaseException as error:
        silent = isinstance(error, Silence)
        place = standing_place(child, aside) if silent and aside is not None else ""
        child.kill()
        child.wait()
        if silent:
            raise no_answer(task, place) from None
        raise
    wants_trace = isinstance(task, JobTask) and task.traceback
    if aside is not None and (
        last is None or (isinstance(last, Failure) and (last.cause is Cause.FAULT or wants_trace))
    ):
        show_aside(aside)
    if last is None:
        return result_without_message(task, child.returncode, asked, memory_kills() > kills)
    return result_of(task, last)


class StoppingWorker:
    """A worker that is asked to stop. Until it listens, SIGINT would end it with a traceback, so it gets SIGTERM
    instead, or SIGKILL if it ignores that. It has nothing to lose by then."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child, self.listens = child, False

    def send_signal(self, sig: int) -> None:
        early = signal.SIGKILL if is_ignored(signal.SIGTERM) else signal.SIGTERM  # a child inherits ignored signals
        self.child.send_signal(sig if self.listens else early)


def error_stream() -> int:
    """The file that workers print to: our error stream, or the process's if ours is no file, as in a notebook."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2 if 2 not in closed_files() else subprocess.DEVNULL


def stands(task: Task[Any]) -> str:
    """A sentence on where a run stands that ended silently; empty if nothing of it is stored."""
    if not task.run_folder:
        return ""
    good, _ = newest_good(Path(task.run_folder) / "checkpoints")
    onward = f"the same command with --run {task.run_folder}"
    return (
        f". Its last checkpoint is of step {good.step}: {onward} goes on from there"
        if good
        else (f". It had saved no checkpoint yet: {onward} begins anew")
    )


def show_aside(aside: IO[bytes]) -> None:
    """Show the output of a failed worker, unless it is too long."""
    aside.seek(max(os.fstat(aside.fileno()).st_size - MOST_SAID, 0))
    say(aside.read().decode(errors="replace"))


def say(text: str) -> None:
    """Print to the error stream, if it exists and can be written to."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)


def result_of(task: Task[R], last: Answer | Failure) -> R:
    """The result in a worker's last message. Raises the error if there was one."""
    if isinstance(last, Failure):
        raise last.error
    return from_json(task.result, last.result)  # type: ignore[no-any-return]


def result_without_message(task: Task[R], code: int, asked: list[int], out_of_memory: bool) -> R:
    """The result, or error, of a worker that ended without a last message."""
    if code == -signal.SIGKILL and out_of_memory:
        raise OutOfMemory("the kernel killed its process when the machine ran out of memory")
    if asked and code in (-signal.SIGTERM, -signal.SIGKILL):  # asked to stop before it could listen
        return task.stop_result(0)
    raise Crashed(ending_text(code) + stands(task))


def memory_kills() -> int:
    """Number of processes that the kernel has killed for lack of memory, on this machine and in this container."""
    count = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError):
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return count


def ending_text(code: int) -> str:
    """The meaning of a worker's exit code."""
    why, meaning = exit_reason(code)
    return (
        f"the worker process died with {why}: {meaning}"
        if code < 0
        else f"the worker process ended with {why} and no result"
    )


def exit_reason(code: int) -> tuple[str, str]:
    """How a process ended, and what that may mean."""
    if code >= 0:
        return f"exit code {code}", ""
    name = signal.Signals(-code).name
    return name, {
        "SIGKILL": "it was killed from outside, by a person, by the limit of a batch system or a container, or by the kernel "
        "when memory ran out (dmesg would tell)",
        "SIGILL": "the processor can't run an instruction that it advertises: run shoestring doctor",
        "SIGSEGV": "a native library crashed",
    }.get(name, "it was stopped from outside")


def fingerprint(file: str) -> dict[str, str]:
    """What must be the same for every worker of a group."""
    import torch

    from shoestring import __version__

    return {
        "job file": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
        "shoestring": __version__,
        "torch": torch.__version__,
    }
