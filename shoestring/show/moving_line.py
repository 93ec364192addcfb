"""The line at the bottom of the terminal that moves, and what is said above it. On a pipe every line stands for itself."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

ERASE = "\x1b[K"  # to the end of the line


class MovingLine:
    """A line that is written over and over. Whatever else is said meanwhile is said by it, so that nothing is left of the line there."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.moves = self.stream.isatty()
        self.shown = ""  # what stands there now

    def show(self, text: str) -> None:
        """Write the line anew; on a pipe, another one."""
        if not self.moves:
            print(text, file=self.stream)
            return
        self.write("\r" + text + self.erasing(len(text)))
        self.shown = text

    def say(self, text: str) -> None:
        """Something above the line, which moves on below it."""
        before = self.shown
        self.clear()
        print(text, file=self.stream)
        if before:
            self.show(before)

    def clear(self) -> None:
        """Leave nothing of it."""
        if self.shown:
            self.write("\r" + self.erasing(0) + "\r")
            self.shown = ""

    def end(self) -> None:
        """Leave it as it is; what follows begins on a line of its own."""
        if self.shown:
            print(file=self.stream)
            self.shown = ""

    def erasing(self, length: int) -> str:
        """What removes the rest of the line after so many characters."""
        return " " * max(len(self.shown) - length, 0) if os.environ.get("TERM") == "dumb" else ERASE

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
