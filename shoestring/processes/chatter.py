"""Output of a job (prints, warnings, progress bars) while it is being planned. Planning makes and runs the job many
times, so every line is shown only once.

In this process, lines go to the error stream, so they never mix with a result. Workers that only measure keep their
output to themselves and show it if they fail (launch.py). While it trains, a job prints normally.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

LAST = 20  # hidden lines that are shown after an error
LONGEST = 10_000  # characters of a line that is repeated again and again


class Overheard(io.TextIOBase):
    """A stream that passes every line on once, or never while `silent`."""

    def __init__(self, stream: TextIO, silent: bool) -> None:
        self.stream, self.silent = stream, silent
        self.rest = ""  # of an incomplete line
        self.lines: dict[str, None] = {}  # lines so far, in order

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False  # so no progress bars are drawn: those are for a reader who sees them once

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        *whole, self.rest = (self.rest + text).split("\n")
        for line in whole:
            self.hear(line.rpartition("\r")[2])
        self.rest = self.rest.rpartition("\r")[2] if not self.rest.endswith("\r") else self.rest[-LONGEST:]
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def hear(self, line: str) -> None:
        if line.strip() and line not in self.lines:
            self.lines[line] = None
            if not self.silent:
                self.stream.write(f"{line}\n")

    def end(self, failed: bool) -> None:
        """Print what is left; after an error also what was hidden."""
        if self.rest:
            self.write("\n")
        if failed and self.silent:
            self.stream.writelines(f"{line}\n" for line in list(self.lines)[-LAST:])
        self.silent = False  # whoever kept this stream may print more, with nobody left to show it


Aloud = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def overheard(silent: bool = False) -> Iterator[Aloud]:
    """While inside, printed lines go to the error stream, each once, or nowhere while `silent`. The yielded function
    wraps a function of ours so that it prints normally."""
    before = sys.stdout, sys.stderr
    said = Overheard(before[1], silent)

    def aloud(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            now = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = before
            try:
                return function(*given)
            finally:
                sys.stdout, sys.stderr = now

        return call

    sys.stdout = sys.stderr = said
    failed = True
    try:
        yield aloud
        failed = False
    finally:
        sys.stdout, sys.stderr = before
        with suppress(ValueError, OSError):  # the reader is gone
            said.end(failed)
