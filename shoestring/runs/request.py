"""A request: what the user asked for, as the run keeps it in run.json and compares it when it goes on."""
from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.regular import read_regular


@dataclass(frozen=True, kw_only=True)
class Request:
    job: str                                                        # path of the job file
    source: str = ""                                                # SHA-256 of the job file
    flags: Mapping[str, Any] = field(default_factory=dict)          # of the job
    memory: int | None = None                                       # bytes of the budget
    use: tuple[str, ...] | None = None                              # techniques as they were written; None: the planner chooses
    inexact: bool = False                                           # the weights may be changed by techniques,
    exact: str | None = None                                        # or must be so close to those of plain training
    plan: str | None = None                                         # SHA-256 of the plan that was given
    environment: Mapping[str, Any] = field(default_factory=dict)    # versions and threads that may change the last bits


def request_for(job: Path, flags: Mapping[str, Any], memory: int | None, use: Sequence[str] | None, inexact: bool,
                plan: str | None, exact: str | None = None) -> Request:
    """What a user asks for here and now."""
    return Request(
        job=str(job), source=hashlib.sha256(job.read_bytes()).hexdigest(), flags=dict(flags), memory=memory,
        use=None if use is None else tuple(use), inexact=inexact, exact=exact,
        plan=hashlib.sha256(read_regular(plan)).hexdigest() if plan else plan, environment=environment_now())


def environment_now() -> dict[str, Any]:
    import torch

    from shoestring import __version__

    return {"shoestring": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "machine": platform.machine(), "threads": torch.get_num_threads()}


def differences(before: Request, now: Request) -> list[str]:
    """What is asked for now that was not then; what is not asked for now stays as it was."""
    found = []
    if before.source != now.source:
        found.append(f"the job file {Path(now.job).name} is not the one it was begun with (kept as job.py in the run)")
    for name in sorted({*before.flags, *now.flags}):
        if before.flags.get(name) != now.flags.get(name) and now.flags:
            found.append(f"--{name} was {before.flags.get(name, 'not given')} and is {now.flags.get(name, 'not given')}")
    for name, was, now_is, given in (
            ("memory", before.memory, now.memory, now.memory is not None),
            ("use", written(before.use), written(now.use), now.use is not None),
            ("inexact", before.inexact, now.inexact, now.inexact), ("exact", before.exact, now.exact, now.exact is not None),
            ("plan", before.plan, now.plan, now.plan is not None)):
        if given and was != now_is:
            found.append(f"--{name} was {'not given' if was is None else was} and is {now_is}")
    return found


def written(use: tuple[str, ...] | None) -> list[str] | None:
    """Techniques as messages show them."""
    return None if use is None else list(use)
