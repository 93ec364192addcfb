"""The command line: commands of rooms (core/command_line/command) and of this package, parsing, errors and exit codes.

A package adds commands by its room (core/rooms), without a change here. Rooms of other packages are only imported for a
command that is not ours, and for the help of all commands.
"""

from __future__ import annotations

import os
import sys

from shoestring.commands.parser import Parser
from shoestring.core.command_line.arguments import add_flags, options_of
from shoestring.core.command_line.command import Call, Command, named_object
from shoestring.core.command_line.exit_codes import CUT_OFF, DONE, FAULT, MISTAKE, OVER_BUDGET, STOPPED
from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake, OverBudget, system_text
from shoestring.core.imports import leave_garbage
from shoestring.core.rooms import installed_rooms, own_rooms
from shoestring.processes.streams import output_trouble, prepare_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

EVERY_ROOM = (
    Command(
        "watch",
        "a live page of runs: plan, memory, loss and events, and whether a run died",
        "shoestring.commands.watch:WatchCommand",
        "shoestring.commands.watch:run",
    ),
    Command(
        "export",
        "a run's weights or figures in other formats",
        "shoestring.commands.export:ExportCommand",
        "shoestring.commands.export:run",
        job_flags=True,
        keeps_result=True,
    ),
)


def main(words: list[str] | None = None) -> None:
    prepare_streams()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # read when torch is imported: without it, garbage on its port prints C++ frames
    words = sys.argv[1:] if words is None else words
    only_shown = set(words) & {"-h", "--help", "--version"}
    code = with_output(run(words), None if only_shown else command_of(words))
    leave_garbage()
    raise SystemExit(code)


def own_commands() -> dict[str, Command]:
    return {one.name: one for one in (*(one for room in own_rooms() for one in room.commands()), *EVERY_ROOM)}


def known_commands(word: str) -> Mapping[str, Command]:
    """All commands by name; those of other packages too, if the word is not one of ours. Ours can't be replaced."""
    own = own_commands()
    if word in own:
        return own
    found = {one.name: one for room in installed_rooms() for one in room.commands()}
    return own | {name: one for name, one in found.items() if name not in own}


def command_of(words: list[str]) -> Command | None:
    return known_commands(words[0]).get(words[0]) if words else None


def with_output(code: int, command: Command | None) -> int:
    """The exit code, given what happened to the output. A command that stores its result has succeeded even if nobody
    reads its output; for other commands the output is the result."""
    trouble = output_trouble()
    if trouble is None or code:
        return code
    keeps = command is not None and command.keeps_result
    if isinstance(trouble, BrokenPipeError):
        return DONE if keeps else CUT_OFF
    kept = "; what it did is kept" if keeps else ""
    print(
        f"shoestring: standard output can't be written ({trouble.strerror}), and what should be there is lost{kept}",
        file=sys.stderr,
    )
    return FAULT


def run(words: list[str]) -> int:
    """Run a command; returns its exit code."""
    shown = "--traceback" in words
    try:
        return parse_and_run(words)
    except OverBudget as error:
        return print_refusal(error, "--json" in words)
    except Mistake as error:
        return print_failure(error, MISTAKE, shown)
    except SystemExit as end:  # argparse has shown the help or the version
        if end.code:
            raise
        return DONE
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED
    except OSError as error:
        command = command_of(words)
        where = " (--run DIR says where a run is kept)" if command is not None and command.runs else ""
        return print_failure(error, MISTAKE, shown, f"{system_text(error)}{where}")
    except ImportError as error:
        from shoestring.core.command_line.extras import install_hint

        hint = install_hint(error)
        return print_failure(error, MISTAKE if hint else FAULT, shown, f"{error}{hint}")
    except Exception as error:
        return print_failure(error, FAULT, shown)


def parse_and_run(words: list[str]) -> int:
    """Parse the words and run the command. Words that are not its flags are passed to a command with a job."""
    asked = words[0] if words else ""
    named = known_commands(asked)
    if asked and not asked.startswith("-") and asked not in named:
        raise Mistake(f"{asked!r} is no command; there are {', '.join(named)}{did_you_mean(asked, named)}")
    top = parser(named, asked)
    if set(words[1:]) & {"-h", "--help"}:  # handled at the end, once the job is known whose flags help shows
        words = [*(word for word in words if word not in ("-h", "--help")), "--help"]
    options, rest = top.parse_known_args(words)
    command, offered = named[asked], [flag for flag in top.below[asked].known if flag.startswith("--")]
    if rest and not command.job_flags:
        raise Mistake(
            f"{rest[0]!r} is no option of {asked}{did_you_mean(rest[0].partition('=')[0], offered)}; "
            f"see shoestring {asked} --help"
        )
    typed = frozenset(word.partition("=")[0] for word in words if word.startswith("--"))
    given = vars(options)
    check_folder()
    call = Call(asked, rest, offered, typed, given["json"], given["traceback"])
    code: int = named_object(command.run)(options_of(named_object(command.options), given), call)
    return code


def check_folder() -> None:
    """Refuse to work in a folder that was deleted: relative paths mean nothing there, and torch's linear algebra ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Mistake("the current folder was deleted or moved: change to one that exists, such as with cd") from None


def parser(commands: Mapping[str, Command], asked: str) -> Parser:
    """The parser of all commands; only the requested command's options are imported and get flags."""
    top = Parser(
        prog="shoestring",
        description="Deep learning on a budget: your PyTorch model, the limits that you set, and the plan that keeps them.",
    )
    from shoestring import __version__

    top.add_argument(
        "--version", action="version", version=f"shoestring {__version__}", help="show the version and end"
    )
    below = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        one = top.below[name] = below.add_parser(name, help=command.help, description=command.help)
        if name == asked:
            one.epilog, one.job_flags = command.epilog, command.job_flags
            add_flags(one, named_object(command.options))
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        one.add_argument("--traceback", action="store_true", help="show where an error came from")
    return top


def print_failure(error: Exception, code: int, shown: bool, text: str = "") -> int:
    if shown:
        import traceback

        traceback.print_exception(error)
    kind = "" if code == MISTAKE or type(error).__name__ == "Crashed" else f"{type(error).__name__}: "
    print(f"shoestring: {kind}{text or error}", file=sys.stderr)
    return code


def print_refusal(error: OverBudget, as_json: bool) -> int:
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
