"""The request: what the user asked for, stored in run.json and compared when the run is resumed."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.files.regular import file_sha256
from shoestring.core.units import bytes_text


@dataclass(frozen=True, kw_only=True)
class Request:
    job: str  # path of the job file
    source: str = ""  # SHA-256 of the job file
    flags: Mapping[str, Any] = field(default_factory=dict)  # flags given for the job
    arguments: Mapping[str, Any] = field(
        default_factory=dict
    )  # all arguments of the job, with defaults filled in; empty: unknown
    memory: int | None = None  # bytes of the budget
    use: tuple[str, ...] | None = None  # techniques as they were written; None: the planner chooses
    inexact: bool = False  # the weights may be changed by techniques,
    exact: str | None = None  # or must be so close to those of plain training
    plan: str | None = None  # SHA-256 of the plan that was given
    room: str = ""  # whose run it is,
    asked: Mapping[str, Any] = field(default_factory=dict)  # and what is asked for there, by its flags; None: it is not
    weights: str = ""  # SHA-256 of the weights that are given, where a run begins with such and not with the job's own
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions and threads that may change the last bits

    @property
    def by_script(self) -> bool:
        """Whether a script made the job, so no file can make it again. A job from a file has the absolute path of that
        file."""
        return not Path(self.job).is_absolute()


def request_for(
    job: Path,
    flags: Mapping[str, Any],
    memory: int | None,
    use: Sequence[str] | None,
    inexact: bool,
    plan: str | None,
    exact: str | None = None,
    room: str = "",
) -> Request:
    """The request for these options, in this environment."""
    return Request(
        job=str(job),
        source=hashlib.sha256(job.read_bytes()).hexdigest(),
        flags=dict(flags),
        memory=memory,
        use=None if use is None else tuple(use),
        inexact=inexact,
        exact=exact,
        room=room,
        plan=file_sha256(plan) if plan else plan,
        environment=environment_now(),
    )


def environment_now() -> dict[str, Any]:
    import torch

    from shoestring import __version__

    return {
        "shoestring": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


OWN = "as the job says"  # shown for a flag that was not given and whose default is not in the job's source
ENDS = {"steps": "epochs", "epochs": "steps"}  # flags of every job: giving one of them replaces the other


def flags_together(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a resumed run: those given now, and the earlier ones that were not given again.

    >>> flags_together({"width": 8, "epochs": 3}, {"steps": 20})
    {'width': 8, 'steps': 20}
    """
    return {name: value for name, value in before.items() if ENDS.get(name) not in now} | dict(now)


def differences(before: Request, now: Request, usual: Mapping[str, Any] | None = None) -> list[str]:
    """What differs from the earlier request. Options that are not given now stay as they were. `usual`: defaults of the
    job's flags."""
    found, same = [], before.source == now.source
    if not same:
        found.append(f"the job file {Path(now.job).name} is not the one it was begun with (kept as job.py in the run)")
    otherwise = (usual or {}) if same else {}
    then, after = before.flags, flags_together(before.flags, now.flags)
    for name in sorted({*then, *after}):
        was = then.get(name, before.arguments.get(name, otherwise.get(name, OWN)))
        is_now = after.get(name, before.arguments.get(name, otherwise.get(name, OWN)) if same else OWN)
        if name in then and name not in after:
            found.append(f"--{name} was {was} and does not count any more, because --{ENDS[name]} is given alone")
        elif was != is_now:
            found.append(f"--{name} changed: {was} before, now {is_now}")
    for name, was, now_is, given in (
        ("memory", before.memory, now.memory, now.memory is not None),
        ("use", technique_texts(before.use), technique_texts(now.use), now.use is not None),
        ("inexact", before.inexact, now.inexact, now.inexact),
        ("exact", before.exact, now.exact, now.exact is not None),
        ("plan", before.plan, now.plan, now.plan is not None),
    ):
        if given and was != now_is:
            found.append(f"--{name} changed: {option_text(name, was)} before, now {option_text(name, now_is)}")
    if before.room != now.room:
        found.append(f"it was begun as a run of {before.room}, and this is one of {now.room}")
        return found
    for name, value in now.asked.items():
        if value is not None and value != (was := before.asked.get(name)):
            found.append(
                f"--{name.replace('_', '-')} changed: {option_text(name, was)} before, now {option_text(name, value)}"
            )
    if before.weights != now.weights:
        found.append("the weights are not those that it was begun with")
    return found


def argument_differences(before: Request, now: Request, arguments: Mapping[str, Any]) -> list[str]:
    """Changed arguments of the job that were not given as flags, then or now; compared as text.

    >>> argument_differences(Request(job="my.py", arguments={"lr": 0.1, "width": 8}), Request(job="my.py"), {"lr": 0.01, "width": 8})
    ['the argument lr of the job changed: 0.1 before, now 0.01']
    """
    if not before.arguments:  # a run of a version that did not record them
        return []
    names = [name for name in {**before.arguments, **arguments} if name not in before.flags and name not in now.flags]
    values = [(name, *(repr(one.get(name, "not there")) for one in (before.arguments, arguments))) for name in names]
    return [
        f"the argument {name} of the job changed: {was} before, now {now}" for name, was, now in values if was != now
    ]


def option_text(name: str, value: Any) -> str:
    """An option's value, as messages show it."""
    if value is None or value is False:
        return "not given"
    if value is True:
        return "given"
    return (
        bytes_text(value)
        if name in ("memory", "size") and isinstance(value, (int, float))
        else f"the file with digest {value[:8]}"
        if name == "plan"
        else str(value)
    )


def technique_texts(use: tuple[str, ...] | None) -> list[str] | None:
    """Techniques as messages show them."""
    return None if use is None else list(use)
