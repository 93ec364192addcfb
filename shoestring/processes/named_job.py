"""The job of a stored run or packed model: named by the caller, never by the folder.

A folder says which job file made it. A job file is code, and anybody can write and seal such a folder, so its statement
is only a `Claim`: it is shown in messages and compared with the caller's job. No path in it is opened. Three things are
used, because they can't name code or a file:

    the name of a built-in job       or its SHA-256: the code is ours
    numbers and switches             flags of the caller's job, each of the type that the job declares
    text that is the job's default   of a flag; any other text could name a file, so the caller must give it again

Contract: No file that a folder names is run or opened, and paths in checkpoints stay inside of the run
(tests/test_code_from_files.py, tests/test_resealed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import file_sha256
from shoestring.core.job import Job
from shoestring.jobfile import BUILT_IN, Flag, flags_known, job_path, load_job
from shoestring.runs.folder import Folder
from shoestring.runs.modules import Modules, changes, imported_modules, kept_modules

Named = (
    Job | Callable[..., Job] | str | Path
)  # a Job, a function that makes one, a job file, or the name of a built-in job
LARGEST = 1 << 63  # no integer flag is larger


@dataclass(frozen=True)
class Claim:
    """What a folder says about the job that made it."""

    folder: Path
    job: str = ""  # path of a file, or name of a built-in job; empty: a script made the job
    source: str = ""  # SHA-256 of the file
    flags: Mapping[str, Any] = field(default_factory=dict)
    modules: Modules = field(default_factory=dict)  # the local modules that it imported

    @property
    def built_in(self) -> str:
        """The path of the built-in job that it names; empty: none."""
        if self.job in BUILT_IN:
            return job_path(self.job)
        return next((path for path in map(job_path, BUILT_IN) if self.source and file_sha256(path) == self.source), "")


def claim_of_run(folder: Folder) -> Claim:
    request = folder.request()
    if request is None:
        raise Mistake(f"{folder.path} is not a run of shoestring: give the folder of one")
    job = "" if request.by_script else request.job
    return Claim(folder.path, job, request.source, request.flags, kept_modules(folder) or {})


def named_job(claim: Claim, named: Named | None, given: Mapping[str, Any]) -> tuple[Job, list[str]]:
    """The job that the caller names for a folder, made with the `given` flags and the folder's; and remarks for the
    caller."""
    if isinstance(named, Job):
        return named, []
    if callable(named):
        made = named(**given)
        if not isinstance(made, Job):
            raise Mistake(f"job= gave a {type(made).__name__}, not a Job")
        return made, []
    path = job_file(claim, named)
    flags, notes = flags_for(claim, path, given)
    job = load_job(path, flags)
    return job, [*changed_code(claim, path), *notes]


def changed_code(claim: Claim, path: str) -> list[str]:
    """Remarks on code that is not what made the folder: the job file, and the local modules that it imports."""
    unchecked = "that its weights have the same names and shapes is checked, what is computed with them is not"
    found = []
    if claim.source and file_sha256(path) != claim.source:
        other = claim.job and Path(claim.job).name != Path(path).name
        changed = f"is not the job that {claim.folder} was made with ({claim.job})" if other else "is not as it was"
        found.append(f"{path} {changed}{'' if other else f' when {claim.folder} was made'}; {unchecked}")
    now = imported_modules(files=claim.modules) if claim.modules else {}
    modules = changes(claim.modules, now, Path(path).parent).changed
    return found + [f"the module {name} is not as it was when {claim.folder} was made; {unchecked}" for name in modules]


def job_file(claim: Claim, named: str | Path | None) -> str:
    """The job file that the caller names, or the built-in job that the folder names."""
    if named is not None:
        return job_path(str(named))
    if claim.built_in:
        return claim.built_in
    if not claim.job:
        raise Mistake(
            f"{claim.folder} was begun by a script, which made its Job itself, so there is no job file to make its model from: "
            f"give --job, a file with `def job(...) -> Job` that makes the same model, or call it in the script, with job="
        )
    raise Mistake(
        f"{claim.folder} says that {claim.job!r} makes its model. A job is code, and anybody can write a folder that names one, "
        f"so it is run only if you name it: add --job {claim.job!r}, if you trust that file"
    )


def flags_for(claim: Claim, path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The flags for the job: those given, and those of the folder's that are safe to use. None of the folder's are used
    if they belong to another job, as a teacher's do beside the student's."""
    known = {flag.name: flag for flag in flags_known(path)}
    others = [name for name in claim.flags if name not in known]
    if others:
        return dict(given), [
            f"{claim.folder} was made with --{others[0]}, which is no flag of {Path(path).name}: of its flags none is "
            f"taken, give those of {Path(path).name} that it needs"
        ]
    mine = {name: value for name, value in claim.flags.items() if name not in given}
    check_taken(claim, path, mine)
    return {**mine, **given}, []


def check_taken(claim: Claim, path: str, flags: Mapping[str, Any]) -> None:
    """Refuse flags of a folder that the caller did not give: text that could name a file, and values of the wrong type."""
    known = {flag.name: flag for flag in flags_known(path)}
    for name, value in flags.items():
        if name in known:
            check_type(claim, known[name], value)
    texts = {
        name: value
        for name, value in flags.items()
        if not is_plain(value) and not (name in known and value == known[name].default)
    }
    if texts:
        again = " ".join(f"--{name} {value!r}" for name, value in texts.items())
        raise Mistake(
            f"{claim.folder} says that it was made with {again[:400]}. Text can name a file, so it is not taken from a folder: "
            f"give {'it' if len(texts) == 1 else 'them'} again, if it is right"
        )


def is_plain(value: Any) -> bool:
    """Whether a value is a number or switch, which can't name anything."""
    return value is None or isinstance(value, (bool, int, float))


def check_type(claim: Claim, flag: Flag, value: Any) -> None:
    """Refuse a value of the wrong type for a flag."""
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    fits = isinstance(value, kinds[flag.kind]) and isinstance(value, bool) == (flag.kind == "bool")
    finite = not isinstance(value, float) or math.isfinite(value)
    small = not isinstance(value, int) or -LARGEST <= value < LARGEST
    if not (fits and finite and small) and not (value is None and flag.default is None):
        raise Mistake(
            f"{claim.folder} says that --{flag.name} was {str(value)[:60]!r}, which is no value of that flag ({flag.kind}): give "
            f"--{flag.name} yourself"
        )
