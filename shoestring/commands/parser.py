"""argparse with our defaults: quick to import, help as wide as the terminal, and every error a plain sentence."""

from __future__ import annotations

import argparse
import os
import re

from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


SAID = (  # argparse's messages, and ours
    (r"^argument (--?[\w-]+)(?:/\S+)?: expected one argument$", r"\1 needs a value"),
    (r"^argument (--?[\w-]+)(?:/\S+)?: invalid int value: (.+)$", r"\1 takes a whole number, and \2 is none"),
    (
        r"^argument (--?[\w-]+)(?:/\S+)?: invalid choice: (\S+) \(choose from (.+)\)$",
        r"\1 takes one of \3, and \2 is none of them",
    ),
    (r"^the following arguments are required: ", "what is missing: "),
)


class Formatter(argparse.HelpFormatter):
    """argparse's own imports a dozen modules to find the terminal's width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=help_width())


def help_width() -> int:
    """Characters in a line of help."""
    try:
        return os.get_terminal_size().columns - 2
    except OSError:
        return 78


class Parser(argparse.ArgumentParser):
    """Without abbreviations: --step would be taken for --steps, and never reach a job that has a flag --step."""

    def __init__(self, **settings: Any) -> None:
        self.known: dict[str, argparse.Action] = {}  # arguments by their flag
        self.below: dict[str, Parser] = {}  # the parsers of commands, by name
        self.job_flags = False  # whether arguments of a job are flags too
        super().__init__(**settings, formatter_class=Formatter, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action=Help, nargs=0, default=argparse.SUPPRESS, help="show this and end")

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        action = super().add_argument(*names, **settings)
        self.known |= {name: action for name in names if name.startswith("-")}
        return action

    def error(self, message: str) -> NoReturn:
        """Report an error in our words; argparse's own message is kept if it is clear enough."""
        for pattern, ours in SAID:
            message = re.sub(pattern, ours, message)
        raise Mistake(f"{message}; see {self.prog} --help")


class Help(argparse.Action):
    """Prints the help; if a job is named, with the flags of that job."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser), "we make no other"
        job = vars(namespace).get("job")
        if job and parser.job_flags:
            add_job_flags(parser, job)
        parser.print_help()
        parser.exit()


WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def add_job_flags(parser: Parser, job: str) -> None:
    """Add the flags of a job to the help, read from its source; for a run, those of the job it was started with. If a
    job can't be read, the help says why."""
    from shoestring.jobfile import OF_EVERY_JOB, flags_of, job_path

    group, hidden = parser.add_argument_group(f"flags of the job {os.path.basename(os.path.normpath(job))}"), []
    kept = os.path.join(job, "job.py")
    try:
        flags = flags_of(job_path(kept if os.path.isfile(kept) else job))
    except (Mistake, OSError) as error:
        group.description = f"they can't be shown: {error}".replace("%", "%%")
        return
    for flag in flags:
        name = f"--{flag.name.replace('_', '-')}"
        usual = (
            ""
            if flag.default is None
            else f" (default {flag.default if flag.default != '' else 'empty'})".replace("%", "%%")
        )
        if flag.name in OF_EVERY_JOB and name in parser.known:
            parser.known[name].help = f"an argument of this job, {WORDS[flag.kind]}{usual}"
        elif name in parser.known:
            hidden.append(name)
        elif flag.kind == "bool":
            group.add_argument(name, f"--no-{name[2:]}", action="store_true", help=f"{WORDS['bool']}{usual}")
        else:
            group.add_argument(name, metavar=flag.kind.upper(), help=f"{WORDS[flag.kind]}{usual}")
    if not flags:
        group.description = "it has none: arguments of its function `job` would be flags"
    if hidden:
        group.description = (
            f"{', '.join(hidden)}: flags of the command have these names; give the job's arguments other ones"
        )
