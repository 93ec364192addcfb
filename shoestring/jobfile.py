"""Job files: plain Python with one function `job(...) -> Job`, whose typed keyword arguments become command-line flags.

The flags are read from the source without running it, so a wrong flag is found before anything heavy is imported; for
an answer within 50 ms, even pathlib and typing are heavy.

`steps`, `epochs` and `seed` are flags of every job. If `job` has no such argument, they are set in the Job that it
returns; they are saved and passed on among the job's own flags, so a run, its workers and a resumed run make the same
job again.
"""

from __future__ import annotations

import ast
import os
from collections import namedtuple

from shoestring.core.command_line.arguments import argument, arguments_of, dataclass
from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.user_code.seams import calls_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job

BUILT_IN = {
    "gpt": "a byte-level transformer on the source of Python's standard library",
    "digits": "a conv net on 8x8 digits",
    "authors": "a byte-level transformer of many authors' text, each a client",
}
TYPES = {"int": int, "float": float, "str": str, "bool": bool}


# kind: "int", "float", "str" or "bool"; default: None if there is none, or if only running the file would tell it
Flag = namedtuple("Flag", ["name", "kind", "default"])


@dataclass(frozen=True)
class Course:
    """What every job can be asked for, whatever its function's arguments are."""

    steps: int | None = argument(
        "N", "number of training steps, instead of the job's; replaces its epochs too, unless --epochs is given"
    )
    epochs: int | None = argument(
        "N", "number of epochs, instead of the job's; replaces its steps too, unless --steps is given"
    )
    seed: int | None = argument("N", "seed of all random numbers, instead of the job's")

    @property
    def values(self) -> dict[str, int]:
        """The values that the user gave, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


OF_EVERY_JOB = tuple(arguments_of(Course))


def job_path(name: str) -> str:
    """The path of a job file given by path or built-in name."""
    if name in BUILT_IN:
        return os.path.join(os.path.dirname(__file__), "jobs", f"{name}.py")
    if os.path.isdir(name) or not os.path.exists(name):
        known = ", ".join(BUILT_IN)
        what = "is a directory, not a job file" if os.path.isdir(name) else "is neither a file nor a built-in job"
        raise Mistake(
            f"{name!r} {what}: give a Python file with `def job(...) -> Job`, or one of {known}"
            f"{did_you_mean(name, [*BUILT_IN, *files_near(name)])}"
        )
    return os.path.realpath(name)


def files_near(name: str) -> list[str]:
    """Python files close to where a misspelt path points; also those in a folder of this name."""
    folder = name if os.path.isdir(name) else os.path.dirname(name)
    try:
        return [os.path.join(folder, file) for file in os.listdir(folder or ".") if file.endswith(".py")]
    except OSError:
        return []


def flags_of(path: str | Path) -> list[Flag]:
    """The flags of a job file, read from its source."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), str(path))  # bytes, so the file's declared encoding is respected
    except (SyntaxError, ValueError) as error:
        raise Mistake(f"{path} is not Python: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "job"]
    if not functions:
        raise Mistake(f"{path} has no function `job`: add `def job(width: int = 256) -> Job: return Job(...)`")
    arguments = functions[-1].args
    names = [*arguments.args, *arguments.kwonlyargs]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + [*arguments.defaults, *arguments.kw_defaults]
    return [flag(path, name, default) for name, default in zip(names, defaults, strict=True)]


def flag(path: str | Path, argument: ast.arg, default: ast.expr | None) -> Flag:
    try:
        value = ast.literal_eval(default) if default is not None else None
    except ValueError:
        value = None
    kind = ast.unparse(argument.annotation) if argument.annotation is not None else type(value).__name__
    kind = kind.replace(" | None", "").strip("'\"")
    if argument.annotation is None and value is None:
        raise Mistake(
            f"{path}: the argument {argument.arg!r} of job needs a type, because its flag --{argument.arg} has to be read as "
            f"something: write {argument.arg}: int (or {', '.join(list(TYPES)[1:])})"
        )
    if kind not in TYPES:
        raise Mistake(
            f"{path}: the argument {argument.arg!r} of job has the type {kind}; flags can be {', '.join(TYPES)}"
        )
    return Flag(argument.arg, kind, value)


def value_of(flag: Flag, text: str) -> Any:
    """A flag's text as a value of its type."""
    if flag.kind == "bool":
        words = {
            "true": True,
            "yes": True,
            "1": True,
            "on": True,
            "false": False,
            "no": False,
            "0": False,
            "off": False,
        }
        if text.lower() not in words:
            raise Mistake(f"--{flag.name} {text}: this flag is true or false")
        return words[text.lower()]
    try:
        return TYPES[flag.kind](text)
    except ValueError:
        raise Mistake(
            f"--{flag.name} {text}: this flag takes {'a whole number' if flag.kind == 'int' else 'a number'}"
        ) from None


def flags_known(path: str | Path) -> list[Flag]:
    """The flags of a job file, and the flags of every job that are not arguments of this one."""
    own = flags_of(path)
    return own + [Flag(name, "int", None) for name in OF_EVERY_JOB if name not in {flag.name for flag in own}]


def parse_flags(path: str | Path, words: list[str], others: Iterable[str] = ()) -> dict[str, Any]:
    """Values of a job's flags from the remaining words of the command line: --width 512, --width=512, --fast,
    --no-fast.

    `others`: further flags to suggest for a misspelt one.
    """
    flags = flags_known(path)
    known = {name: flag for flag in flags for name in {flag.name, flag.name.replace("_", "-")}}
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, _, text = word.removeprefix("--").partition("=")
        negated = name.startswith("no-") and name.removeprefix("no-") in known
        found = known.get(name.removeprefix("no-") if negated else name)
        if not word.startswith("--") or found is None:
            offered = ", ".join(f"--{flag.name}" for flag in flags)
            raise Mistake(
                f"{word!r} is no option of this command nor of the job {os.path.basename(path)}; the job's own are {offered}"
                f"{did_you_mean(word.partition('=')[0], [*(f'--{name}' for name in known), *others])}"
            )
        if found.kind == "bool" and not text:
            values[found.name] = not negated
        elif not text and (not rest or rest[0].startswith("--")):
            usual = EXAMPLES[found.kind] if found.default in (None, "") else found.default
            raise Mistake(f"--{found.name} needs a value, such as --{found.name} {usual}")
        else:
            values[found.name] = value_of(found, text or rest.pop(0))
    check_course({name: value for name, value in values.items() if known[name].kind == "int"})
    return values


EXAMPLES = {"int": "8", "float": "0.1", "str": "text", "bool": "true"}


def usual_values(path: str | Path) -> dict[str, Any]:
    """Default values of a job file's flags, as far as its source tells."""
    return {flag.name: flag.default for flag in flags_of(path) if flag.default is not None}


def check_course(values: Mapping[str, Any]) -> None:
    """Refuse impossible values for steps, epochs or seed."""
    for name, value in values.items():
        if name in OF_EVERY_JOB and (not isinstance(value, int) or isinstance(value, bool)):
            raise Mistake(f"--{name} {value}: give a whole number")
        if name in ("steps", "epochs") and value < 1:
            raise Mistake(f"--{name} {value}: give 1 or more; left out, it is as the job says")


def with_course(job: Job, values: Mapping[str, Any], given: Iterable[str] = ()) -> Job:
    """A job with other steps, epochs or seed. Giving only one of steps and epochs makes that one decide when training
    ends: the job's other one is dropped, unless it was `given` too. For a job from a file, they are also recorded among
    its flags."""
    from dataclasses import replace

    check_course(values)
    dropped = {
        name: 0
        for name, other in (("steps", "epochs"), ("epochs", "steps"))
        if other in values and name not in values and name not in given
    }
    flags = {name: value for name, value in job.origin.flags if name not in dropped} if job.origin else {}
    origin = job.origin and replace(job.origin, flags=tuple({**flags, **values}.items()))
    return replace(job, **{**dropped, **values}, origin=origin)


IMPORTED: set[str] = set()  # modules that job files have imported in this process


@calls_user("file")
def load_job(path: str | Path, values: dict[str, Any]) -> Job:
    """Run a job file's `job` function; an error in it is reported to the user in one sentence."""
    import importlib.util
    import inspect
    import sys
    from contextlib import suppress
    from dataclasses import replace

    from shoestring.core.job import Job, Origin
    from shoestring.measure.instructions import cap_this_process

    cap_this_process()  # before the file can run a matrix product, after which it would be too late
    folder, file = os.path.split(path)
    before = set(sys.modules)
    name = f"shoestring_job_{file.removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a path to a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if not within_package(
        folder
    ):  # our own neighbours would hide the user's modules of the same name, such as losses.py
        with suppress(ValueError):
            sys.path.remove(folder or ".")
        sys.path.insert(
            0, folder or "."
        )  # and it stays there: functions of the job may import neighbouring modules later
    try:
        spec.loader.exec_module(module)
        own = inspect.signature(module.job).parameters
        anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values())
        for given in () if anything else set(values) - set(own) - set(OF_EVERY_JOB):
            raise Mistake(f"the job {file} has no argument {given!r}{did_you_mean(given, [*own, *OF_EVERY_JOB])}")
        bound = inspect.signature(module.job).bind(
            **{name: value for name, value in values.items() if name in own or name not in OF_EVERY_JOB}
        )
        job = module.job(*bound.args, **bound.kwargs)
    except Mistake:
        raise
    except (Exception, SystemExit) as error:  # such as argparse's, which reads our command line
        from shoestring.core.command_line.extras import install_hint
        from shoestring.core.user_code.blame import failure_text

        raise Mistake(
            f"{path} raised {failure_text(error)}{install_hint(error)}; add --traceback to see more"
        ) from error
    IMPORTED.update(set(sys.modules) - before)
    if not isinstance(job, Job):
        raise Mistake(f"{path}: job() gave {type(job).__name__}, not a Job; end it with `return Job(...)`")
    job = with_course(
        job, {name: value for name, value in values.items() if name in OF_EVERY_JOB and name not in own}, values
    )
    bound.apply_defaults()
    return replace(
        job, origin=Origin(str(path), tuple(values.items()), tuple(flatten_keywords(bound.arguments, own).items()))
    )


def within_package(folder: str) -> bool:
    """Whether a folder is part of shoestring, as those of built-in jobs are."""
    package = os.path.dirname(os.path.realpath(__file__))
    return os.path.commonpath([package, os.path.realpath(folder or ".")]) == package


def flatten_keywords(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with those that `**` took merged in."""
    return {
        key: value
        for name, one in arguments.items()
        for key, value in (one.items() if parameters[name].kind is parameters[name].VAR_KEYWORD else ((name, one),))
    }


def resolved_arguments(job: Job) -> dict[str, Any]:
    """The arguments that a job from a file was made with, including defaults, steps or epochs, and seed: JSON values as
    they are, others as text."""
    if job.origin is None:
        return {}
    found = {**dict(job.origin.arguments), **dict(job.origin.flags)}
    course = {"steps": job.steps, "epochs": job.epochs, "seed": job.seed}
    found |= {name: value for name, value in course.items() if name not in found and (value or name == "seed")}
    return {name: readable(value) for name, value in found.items()}


def readable(value: Any) -> Any:
    """The value of an argument as a run stores it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [readable(one) for one in value]
    if isinstance(value, dict):
        return {str(key): readable(one) for key, one in value.items()}
    return str(value) if isinstance(value, os.PathLike) else f"a {type(value).__qualname__}"
