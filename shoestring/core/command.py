"""A command as a room declares it, and a call of it.

The command line has it with its flags, and imports nothing of the room until it is called:

    Command("shorten", "a text made small enough", "texts.options:ShortenOptions", "texts.command:shorten")
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# name: as it is typed; help: one line; options: "module:class" of what can be asked for (core/arguments), and run: "module:function" that
# does it, called with such a value and a Call, and gives the exit code; epilog: what stands below its help; job_flags: whether a job's own
# arguments are flags too; keeps_result: it is in a folder or file, whatever becomes of what is printed; runs: in which a run is kept
Command = namedtuple(
    "Command",
    ["name", "help", "options", "run", "epilog", "job_flags", "keeps_result", "runs"],
    defaults=["", False, False, False],
)

# How a command was called, beside its options. words: those that are no flags of it, for the job; own_flags: its flags; given: the flags
# that were typed; json: print one JSON object and nothing else; traceback: show where an error came from
Call = namedtuple(
    "Call",
    ["command", "words", "own_flags", "given", "json", "traceback"],
    defaults=[[], [], frozenset(), False, False],
)

# Whose format `shoestring export` writes, beside those that all runs have. name: as --to takes it; help: what it is; ending: what follows
# "export" in the name of the file or folder; write: "module:function", called with a runs.export.WeightsExport, gives an Exported
ExportFormat = namedtuple("ExportFormat", ["name", "help", "ending", "write"])


def named_object(place: str) -> Any:
    """What stands at "module:name"."""
    from importlib import import_module

    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
