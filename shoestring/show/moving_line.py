"""The moving line at the bottom of the terminal, and messages above it. On a pipe every line is printed separately."""

from __future__ import annotations

import os
import sys

from shoestring.show.output import screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

ERASE = "\x1b[K"  # to the end of the line


class MovingLine:
    """A line that is overwritten again and again. All other messages are printed by it too, so that nothing of the line
    is left in them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.moves = self.stream.isatty()
        self.shown = ""  # the present text

    def show(self, text: str) -> None:
        """Replace the line; on a pipe, print another one."""
        if not self.moves:
            print(text, file=self.stream)
            return
        self.write("\r" + text + self.erasing(len(text)))
        self.shown = text

    def say(self, text: str) -> None:
        """Print a message above the line."""
        before = self.shown
        self.clear()
        print(text, file=self.stream)
        if before:
            self.show(before)

    def remind(self, text: str) -> None:
        """Show that something still goes on: in place of the line, cut to its width; on a pipe, as another one."""
        width = screen(self.stream).width
        self.show(text if width is None else text[: width - 1])

    def clear(self) -> None:
        """Erase the line."""
        if self.shown:
            self.write("\r" + self.erasing(0) + "\r")
            self.shown = ""

    def end(self) -> None:
        """Leave the line as it is; later output starts on a new line."""
        if self.shown:
            print(file=self.stream)
            self.shown = ""

    def erasing(self, length: int) -> str:
        """The characters that erase the rest of a line after `length` characters."""
        return " " * max(len(self.shown) - length, 0) if os.environ.get("TERM") == "dumb" else ERASE

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
