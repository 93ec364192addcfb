"""The table of commands, and what all of them share: parsing, errors and exit codes.

A command is a module, or any object, with `name`, `help` (one line), `flags(parser)`, which adds its flags, and `run(options)`, which does
it and gives its exit code. A package adds one without a change here, by an entry point of the group "shoestring.commands" that has the
command's name:

    [project.entry-points."shoestring.commands"]
    sweep = "my_package.sweep"

Entry points are looked up only for a name that is none of ours, and named in the help of all commands; none is imported for that.
"""

from __future__ import annotations

import os
import sys

from shoestring.commands import (
    CUT_OFF,
    DONE,
    FAULT,
    MISTAKE,
    OVER_BUDGET,
    STOPPED,
    compress,
    distill,
    doctor,
    export,
    federate,
    plan,
    train,
    verify,
    watch,
)
from shoestring.commands.parser import Parser
from shoestring.core.errors import Mistake, OverBudget, system_text
from shoestring.core.imports import leave_garbage
from shoestring.core.suggest import did_you_mean
from shoestring.processes.streams import output_trouble, prepare_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any, Protocol

    class Command(Protocol):
        @property
        def name(self) -> str: ...
        @property
        def help(self) -> str: ...
        def flags(self, parser: ArgumentParser, /) -> None: ...
        def run(self, options: Namespace, /) -> int: ...


BUILT_IN: tuple[Command, ...] = (plan, train, distill, federate, compress, verify, watch, export, doctor)
KEEP_RESULTS = (
    "train",
    "distill",
    "federate",
    "compress",
    "export",
)  # commands that write their result to a folder or file
GROUP = "shoestring.commands"


def main(words: list[str] | None = None) -> None:
    prepare_streams()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # read when torch is imported: else odd bytes on its port show C++ frames
    words = sys.argv[1:] if words is None else words
    code = with_output(run(words), words[0] if words else "")
    leave_garbage()
    raise SystemExit(code)


def with_output(code: int, command: str) -> int:
    """The exit code of a command, by what became of what it printed. One that keeps its result in a folder has done what it was asked for
    when nobody reads on; of the others, what they print is the result."""
    trouble = output_trouble()
    if trouble is None or code:
        return code
    if isinstance(trouble, BrokenPipeError):
        return DONE if command in KEEP_RESULTS else CUT_OFF
    kept = "; what it did is kept" if command in KEEP_RESULTS else ""
    print(
        f"shoestring: standard output can't be written ({trouble.strerror}), and what should be there is lost{kept}",
        file=sys.stderr,
    )
    return FAULT


def run(words: list[str]) -> int:
    """Do a command; gives its exit code."""
    shown = "--traceback" in words
    try:
        return done(words)
    except OverBudget as error:
        return refused(error, "--json" in words)
    except Mistake as error:
        return failed(error, MISTAKE, shown)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED
    except OSError as error:
        where = " (--run DIR says where a run is kept)" if words[:1] in (["train"], ["distill"], ["federate"]) else ""
        return failed(error, MISTAKE, shown, f"{system_text(error)}{where}")
    except Exception as error:
        return failed(error, FAULT, shown)


def done(words: list[str]) -> int:
    """Parse the words and run their command. Words that are no flag of it are left to a command with the default `job_words`, which is
    also told what flags were `given` and which there are (`own_flags`)."""
    own = {command.name for command in BUILT_IN}
    commands = (
        BUILT_IN if not words or words[0].startswith("-") or words[0] in own else (*BUILT_IN, *from_packages(words[0]))
    )
    named = {command.name: command for command in commands}
    if words and not words[0].startswith("-") and words[0] not in named:
        raise Mistake(f"{words[0]!r} is no command; there are {', '.join(named)}{did_you_mean(words[0], named)}")
    top = parser(commands, words[0] if words else "")
    if words[:1] in ([], ["-h"], ["--help"]):
        top.epilog = others_text()
    if set(words[1:]) & {"-h", "--help"}:  # at the end, where the job is known whose flags are to be shown
        words = [*(word for word in words if word not in ("-h", "--help")), "--help"]
    options, rest = top.parse_known_args(words)
    offered = [flag for flag in top.below[options.command].known if flag.startswith("--")]
    if "job_words" in options:
        options.job_words, options.own_flags = rest, offered
        options.given = {word.partition("=")[0] for word in words if word.startswith("--")}
    elif rest:
        raise Mistake(
            f"{rest[0]!r} is no option of {options.command}{did_you_mean(rest[0].partition('=')[0], offered)}; "
            f"see shoestring {options.command} --help"
        )
    return named[options.command].run(options)


def parser(commands: tuple[Command, ...], asked: str) -> Parser:
    """Of all commands; the flags are only those of the one that is asked for, because some come from dataclasses."""
    top = Parser(
        prog="shoestring",
        description="Deep learning on a budget: your PyTorch model and your memory, "
        "the plan that meets it, and the proof.",
    )
    from shoestring import __version__

    top.add_argument(
        "--version", action="version", version=f"shoestring {__version__}", help="show the version and end"
    )
    below = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        one = top.below[command.name] = below.add_parser(command.name, help=command.help, description=command.help)
        if command.name == asked:
            command.flags(one)
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        one.add_argument("--traceback", action="store_true", help="show where an error came from")
    return top


def others_text() -> str:
    """Commands that other packages bring, by name: to know more of one it would have to be imported. Read off what pip wrote, because
    importlib.metadata takes longer to import than all of our help takes."""
    import re
    from contextlib import suppress

    found, own = set(), {command.name for command in BUILT_IN}
    for folder in dict.fromkeys(sys.path):
        names = []
        with suppress(OSError):
            names = [name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info"))]
        for name in names:
            with (
                suppress(OSError, ValueError),
                open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file,
            ):
                section = file.read().partition(f"[{GROUP}]")[2].partition("\n[")[0]
                found |= set(re.findall(r"^\s*([\w.-]+)\s*=\s*(\S+)", section, re.MULTILINE))
    others = [f"{name} ({value})" for name, value in sorted(found) if name not in own]
    return f"commands of other packages: {', '.join(others)}" if others else ""


def from_packages(wanted: str) -> tuple[Command, ...]:
    """The command of this name that another package brings, if one does."""
    from importlib.metadata import entry_points

    found = [entry for entry in entry_points(group=GROUP) if entry.name == wanted]
    try:
        return tuple(entry.load() for entry in found[:1])
    except Exception as error:
        raise Mistake(
            f"the command {wanted} of {found[0].value} can't be imported ({type(error).__name__}: {error}): mend or remove the "
            f"package that brings it"
        ) from error


def failed(error: Exception, code: int, shown: bool, text: str = "") -> int:
    if shown:
        import traceback

        traceback.print_exception(error)
    kind = "" if code == MISTAKE or type(error).__name__ == "Crashed" else f"{type(error).__name__}: "
    print(f"shoestring: {kind}{text or error}", file=sys.stderr)
    return code


def refused(error: OverBudget, as_json: bool) -> int:
    nearest: Any = error.nearest
    if as_json:
        import json

        told = nearest.as_json()
        least = (
            {"least_bytes": told["process_bytes"]} if "process_bytes" in told else {}
        )  # other rooms have other budgets
        print(json.dumps({"error": str(error), **least, "nearest": told}))
    print(f"shoestring: {error}", file=sys.stderr)
    return OVER_BUDGET
