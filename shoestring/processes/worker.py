"""The worker: does one task in a process of its own. It reads the task from standard input and writes messages to a
pipe."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.core.imports import WithoutGarbageCollection, leave_garbage

with WithoutGarbageCollection():  # this imports torch
    from shoestring.core.command_line.extras import install_hint
    from shoestring.core.errors import (
        Mistake,
        NotRepeatable,
        error_sentence,
        first_line,
        says_out_of_memory,
        system_text,
    )
    from shoestring.core.files.codec import to_json
    from shoestring.core.private import load_compiler
    from shoestring.core.user_code.blame import blame_for
    from shoestring.processes.messages import Answer, Cause, Failure, Message, Send, event_message, message_text
    from shoestring.processes.standstill import answer_when_asked
    from shoestring.processes.streams import prepare_streams
    from shoestring.processes.task import JobTask, Task, read_task
    from shoestring.runs.events.event import Event, Failed
    from shoestring.runs.events.event_log import note

if TYPE_CHECKING:
    from shoestring.core.workers.link import Link


def perform_task(task: Task[Any], send: Send, link: Link | None = None) -> Any:
    """Do a task and return its result. `link` leads to the other workers of a group."""

    def tell(event: Event) -> None:
        send(event_message(event))

    return task.perform(tell, link)


def main() -> None:
    prepare_streams()
    answer_when_asked()
    pipe = os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8")
    turn = threading.Lock()  # checkpoints are finished, and reported, by another thread

    def send(message: Message) -> None:
        with turn:
            pipe.write(message_text(message) + "\n")

    task = read_task(sys.stdin.buffer.read().decode())
    if isinstance(task, JobTask):
        load_compiler()
    last = last_message(task, lambda: perform_task(task, send))
    if isinstance(last, Failure):
        sys.stderr.write(last.trace)
        if task.run_folder:
            with suppress(OSError):
                note(Path(task.run_folder), Failed(last.text))
    with suppress(BrokenPipeError):
        send(last)
    leave_garbage()


def last_message(task: Task[Any], work: Callable[[], Any]) -> Answer | Failure:
    """A worker's last message: its result, or what went wrong."""
    try:
        return Answer(to_json(work()))
    except Exception as error:
        cause, text = failure(error, task)
        wanted = cause is Cause.FAULT or (isinstance(task, JobTask) and task.traceback)
        return Failure(cause, text, traceback.format_exc() if wanted else "")


def failure(error: Exception, task: Task[Any]) -> tuple[Cause, str]:
    """Whose failure an error is, and how to describe it."""
    if isinstance(error, NotRepeatable):
        return Cause.NOT_REPEATABLE, str(error)
    if isinstance(error, Mistake):
        return Cause.MISTAKE, str(error)
    if says_out_of_memory(error):
        return Cause.OUT_OF_MEMORY, f"memory ran out: {first_line(error) or 'no more'}"
    found = blame_for(error)
    if not found.ours:
        return Cause.JOB, job_failed(error, found.place)
    if isinstance(error, OSError):  # the machine refuses: nobody's fault
        return Cause.MISTAKE, f"{system_text(error)} ({found.place})"
    broken = (
        "a promise of shoestring's own code was broken"
        if isinstance(error, AssertionError)
        else "a fault of shoestring"
    )
    used = " + ".join(task.techniques_used)
    without = f"; training may work without {used}: name others with --use" if used else ""
    return (
        Cause.FAULT,
        f"{broken} in {found.place}: {error_sentence(error)}; please report it with the lines above{without}",
    )


def job_failed(error: Exception, place: str) -> str:
    """An error of the user's model or data as a sentence, with the line that raised it."""
    first, hint = error_sentence(error), ""
    if "device" in first and ("Expected all tensors" in first or "meta" in first):
        hint = "; the model and its batch must be on one device: leave both on the CPU and shoestring moves them"
    return f"the job failed in {place}: {first}{hint or install_hint(error)}; add --traceback to see more"


if __name__ == "__main__":
    main()
