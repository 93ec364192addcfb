"""The library function `shoestring.serve`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoestring.core.command_line.extras import require
from shoestring.core.command_line.options import speaking_of_arguments
from shoestring.core.technique import text
from shoestring.jobfile import job_path
from shoestring.runs.events.event import Event
from shoestring.runs.session import Session
from shoestring.serving.command import check_folder, check_use
from shoestring.serving.loading import ServedSource
from shoestring.serving.options import ListenOptions, ServeOptions
from shoestring.serving.serving_run import ServingResult, ServingRun, held_folder
from shoestring.serving.technique import ServingTechnique
from shoestring.show.page import page


@speaking_of_arguments()
def serve(
    model: str | Path,
    *,
    job: str | Path | None = None,
    p99: str | float | None = None,
    latency: str | None = None,
    memory: str | int | None = None,
    throughput: str | float | None = None,
    size: str | int | None = None,
    keep: str | float | None = None,
    use: Iterable[str | ServingTechnique] | None = None,
    newest: bool = False,
    host: str = "127.0.0.1",
    port: int | str = 8000,
    name: str | None = None,
    token: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    run: str | Path | None = None,
    fresh: bool = False,
    tell: Callable[[Event], None] | None = None,
    **flags: Any,
) -> ServingResult:
    """Measure a model, choose the best server within a target, and serve until Ctrl-C or SIGTERM.

        done = shoestring.serve("runs/mine", job="train.py", p99="50ms")
        print(done.requests, done.failures)

    model       the folder of a run or of a compressed model, or a job file with weights; other processes load it, so it
                is named, not given. `flags` are the job's own
    job         of a run or a compressed model: the job file, or a built-in one
    p99, latency, memory, throughput, size, keep    limits: latency is a time and a percentile, "20ms@95%"
    use         exactly these techniques instead of choosing: ["PackedBatching(tokens=512)"]
    newest      of a run: its newest weights, not those that were best in validation
    host, port, name, token, certificate, key    how the server is reached
    run, fresh  the folder that keeps the plan and what happened (default: runs/NAME-serving): the same call serves again
                by the kept plan; measure and choose anew
    tell        called with every event

    Raises Mistake if something can't work, and OverBudget if nothing fits.
    """
    require("serve")
    written = None if use is None else tuple(one if isinstance(one, str) else text(one) for one in use)
    check_use(written or ())
    asked = ServeOptions(p99, latency, memory, throughput, size, keep, written, newest)
    asked.budget()
    source = ServedSource(source_path(str(model)), None if job is None else str(job), flags, newest)
    listen = ListenOptions(host, port, name, token, certificate, key)
    with Session(held_folder(source, asked, run, fresh), page, by_script=True) as session:
        served = ServingRun(session, source, asked, listen, heard=tell or (lambda event: None), secret=tell_token)
        played = session.play(served)
        assert played.ended is not None, "a server is never finished"
        return played.ended


def source_path(path: str) -> str:
    if not os.path.isdir(path):
        return job_path(path)
    check_folder(path)
    return path


def tell_token(token: str) -> None:
    warnings.warn(f"clients send the header Authorization: Bearer {token}", stacklevel=2)
