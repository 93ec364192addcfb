"""A script's job for other processes: pickled into a folder, beside a job file that loads it.

Worker processes make their job from a file, so a script's job is turned into one: then everything that works with job
files (trials in planning, groups, recovery) works with it. Pickle stores functions and classes by name. Names defined
in the script itself are found by importing the script in the worker, not as the main program: code under `if __name__
== "__main__":` does not run again there, and a script that would plan or train on import is refused.

Contract: Groups, trials and recovery know nothing of scripts (tests/training/execution/scripts/test_script_group.py).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import pickle
import sys
from dataclasses import fields, replace
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.user_code.data_objects import GivenData
from shoestring.jobfile import load_job
from shoestring.runs.reports.export import model_of
from shoestring.training.execution.scripts.script_run import job_description

SCRIPT = "shoestring_script"  # module name under which a worker imports the script
JOB = "job.pickle"
OURS = ("origin", "mesh")  # fields of a job that every process sets itself
GUARD = 'put what begins it under `if __name__ == "__main__":`'
FILE = '''"""A job that a script made; its parts are pickled beside this file. What can be seen of it has the SHA-256 {digest}."""
from shoestring.training.execution.scripts.sent_job import load_sent_job


def job():
    return load_sent_job(__file__, {file!r}, {module!r}, {path!r})
'''


class SentOrigin:
    """Where this process's job came from: the script's file, its module name (`python -m`), and whether it is being
    imported now."""

    file = module = ""
    importing = False


origin = SentOrigin()


class FromFile:
    """A factory that unpickles its value anew every time."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> Any:
        return unpickle(Path(self.path))


class Given:
    """A factory that returns one object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


class Pickler(pickle.Pickler):
    """Records which names of the script it meets."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.of_script: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, (type, FunctionType)) and value.__module__ in ("__main__", SCRIPT):
            self.of_script.add(value.__qualname__)


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", SCRIPT):
            found: Any = script()
            for part in name.split("."):
                found = getattr(found, part)
            return found
        return super().find_class(module, name)


def send_job(job: Job, model: nn.Module | None, folder: Path, devices: int) -> Job:
    """The job as one that other processes can make again from a file in this folder; with this model object, if
    given."""
    if job.origin is not None and model is None:
        return job
    parts = {one.name: getattr(job, one.name) for one in fields(job) if one.name not in OURS}
    of_script: set[str] = set()
    if model is not None:
        written, of_script = pickle_value(model, "the model")
        (folder / "model.pickle").write_bytes(written)
        parts["model"] = FromFile(str(folder / "model.pickle"))
    for name, value in parts.items():
        of_script |= pickle_value(
            value, "the data" if name == "data" and isinstance(value, (Given, GivenData)) else f"the job's {name}"
        )[1]
    if of_script:
        check_guard(sorted(of_script)[0], devices)
    whole, _ = pickle_value(parts, "the job")
    (folder / JOB).write_bytes(whole)
    name = type(model).__name__ if model is not None else "job"
    file = folder / f"{name}.py"
    folders = (Path(one).resolve() for one in sys.path)
    path = [str(one) for one in folders if not (one / JOB).exists()]  # without folders of sent jobs, which come and go
    seen = job_description(
        job, model_of(job.model) if model is None else model
    )  # so the same job has the same file wherever it lies
    file.write_text(
        FILE.format(
            digest=hashlib.sha256(seen.encode()).hexdigest(), file=script_file(), module=script_module(), path=path
        ),
        encoding="utf-8",
    )
    return replace(load_job(file, {}), mesh=job.mesh)


def pickle_value(value: Any, what: str) -> tuple[bytes, set[str]]:
    """The bytes of a value, and the names of the script in it. Refuses what pickle can't store, with advice."""
    file = io.BytesIO()
    pickler = Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:  # pickle calls methods of the user's objects
        raise Mistake(
            f"{what} can't be sent to the worker processes that --devices starts: {reason(value, error)}; {cure(value)}, or "
            f"write a job file and give its path"
        ) from error
    return file.getvalue(), pickler.of_script


def reason(value: Any, error: Exception) -> str:
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        return "it is a lambda, which has no name that they could find it by"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def cure(value: Any) -> str:
    if isinstance(value, (FunctionType, MethodType)):
        return "define it with def at the top level of a module"
    return "make it of parts that pickle can keep (classes and functions at the top level of a module, no open files or generators)"


def load_sent_job(file: str, found: str, module: str, path: list[str]) -> Job:
    """The job pickled beside a job file by the script in `found` or named `module`, with these folders to import
    from."""
    origin.file, origin.module = found, module
    sys.path += [one for one in path if one not in sys.path]
    return Job(**unpickle(Path(file).with_name(JOB)))


def unpickle(path: Path) -> Any:
    with open(path, "rb") as file:
        return Unpickler(file).load()


def script_file() -> str:
    """The main program's file; empty at a prompt or in a notebook."""
    found = vars(sys.modules["__main__"]).get("__file__")
    return str(Path(found).resolve()) if found and Path(found).is_file() else ""


def script_module() -> str:
    """The main program's module name if it was started by `python -m`; else empty."""
    spec = vars(sys.modules["__main__"]).get("__spec__")
    return str(spec.name) if spec is not None else ""


def script() -> ModuleType:
    """The script that made the job, as a module: the main program, or imported here."""
    if script_file() == origin.file:
        return sys.modules["__main__"]
    if SCRIPT not in sys.modules:
        origin.importing = True
        try:
            sys.modules[SCRIPT] = import_module(origin.module) if origin.module else import_script(origin.file)
        finally:
            origin.importing = False
    return sys.modules[SCRIPT]


def import_script(file: str) -> ModuleType:
    loader = SourceFileLoader(SCRIPT, file)
    spec = importlib.util.spec_from_file_location(SCRIPT, file, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[SCRIPT]
        raise
    return module


def check_guard(name: str, devices: int) -> None:
    """Refuse a script that would start over when a worker imports it to find one of its names."""
    file = script_file()
    if not file:
        raise Mistake(
            f"--devices {devices} starts processes that have to find {name}, which was defined at a prompt or in a notebook, "
            f"where they can't look: put it into a module and import it, or write a job file and give its path"
        )
    lines = ast.parse(Path(file).read_bytes()).body
    if not any(isinstance(one, ast.If) and "__name__" in ast.dump(one.test) for one in lines):
        raise Mistake(
            f"--devices {devices} starts processes that import {Path(file).name} to find {name} there, and would begin "
            f"anew: {GUARD}"
        )


def refuse_while_imported(what: str, devices: int = 1) -> None:
    """Called before a script plans or trains with so many workers: refuses if it is being imported by a worker."""
    if devices < 1:
        raise Mistake(f"--devices {devices}: give 1 or more")
    if origin.importing:
        raise Mistake(
            f"{Path(origin.file).name} calls shoestring.{what} while a worker process imports it, and would begin anew there: "
            f"{GUARD}"
        )
