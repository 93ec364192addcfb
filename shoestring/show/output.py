"""Messages of commands besides their result: on the error stream, where they never mix with --json."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import TextIO

    from shoestring.core.command_line.command import Call
    from shoestring.show.terminal import Screen


def say(call: Call, text: str) -> None:
    """Print a message for the person at the terminal."""
    if sys.stderr.isatty() or not call.json:
        print(text, file=sys.stderr)


def warn(texts: Iterable[str]) -> None:
    """Print warnings."""
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)


def write_page(place: Path, text: str, asked: bool = False) -> None:
    """Write a page. If that fails, print a warning; the run is not affected."""
    from shoestring.core.files.files import write_whole

    try:
        write_whole(place, text.encode(), asked)
    except OSError as error:
        warn([f"{place} can't be written: {error.strerror}"])


def screen(stream: TextIO) -> Screen:
    """A stream's width, and whether it gets colours (https://no-color.org)."""
    from shoestring.show.terminal import PIPE, Screen

    if not stream.isatty():
        return PIPE
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        width = 80
    return Screen(max(width, 20), not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")
