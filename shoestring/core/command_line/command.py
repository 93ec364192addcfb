"""A command that a room adds to the command line, and one call of it.

Nothing of the room is imported until the command is called:

    Command("shorten", "a text made small enough", "texts.options:ShortenOptions", "texts.command:shorten")
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# name: as typed. help: one line. options: "module:class" of its options (core/command_line/arguments). run: "module:function",
# called with an instance of that class and a Call; returns the exit code. epilog: text below its help. job_flags:
# whether the job's own arguments are flags too. keeps_result: its result is in a folder or file, so a closed output
# does not end it. runs: whether it keeps a run in a folder
Command = namedtuple(
    "Command",
    ["name", "help", "options", "run", "epilog", "job_flags", "keeps_result", "runs"],
    defaults=["", False, False, False],
)

# A call of a command. words: the arguments that are not its own flags, for the job; own_flags: its flags; given: the
# flags that were typed; json: print one JSON object and nothing else; traceback: show where an error came from
Call = namedtuple(
    "Call",
    ["command", "words", "own_flags", "given", "json", "traceback"],
    defaults=[[], [], frozenset(), False, False],
)

# Whose format `shoestring export` writes, beside those that all runs have. name: as --to takes it; help: what it is; ending: what follows
# "export" in the name of the file or folder; write: "module:function", called with a runs.export.WeightsExport, gives an Exported
ExportFormat = namedtuple("ExportFormat", ["name", "help", "ending", "write"])


def named_object(place: str) -> Any:
    """The object at "module:name", imported now."""
    from importlib import import_module

    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
