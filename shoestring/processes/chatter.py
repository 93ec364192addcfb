"""What a job says (prints, warnings, bars of progress) while it is planned: planning makes and runs it many times, and it is shown once.

In this process, each line once, on the error stream, so that it is never in the way of a result. Workers that only measure keep what they
hear to themselves, and show it if they fail (launch.py). While it trains, a job says what it wants.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

LAST = 20  # lines that were not shown and are shown after an error
LONGEST = 10_000  # characters of a line that is written again and again


class Overheard(io.TextIOBase):
    """A stream that passes every line on once; or none, while `silent`."""

    def __init__(self, stream: TextIO, silent: bool) -> None:
        self.stream, self.silent = stream, silent
        self.rest = ""  # of a line that is not over
        self.lines: dict[str, None] = {}  # that were said, in their order

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False  # bars that move are for a person who reads them once

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
        """Say what is left; after an error also what was not shown."""
        if self.rest:
            self.write("\n")
        if failed and self.silent:
            self.stream.writelines(f"{line}\n" for line in list(self.lines)[-LAST:])
        self.silent = False  # who kept this stream may have more to say, and nobody else will say it


Aloud = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def overheard(silent: bool = False) -> Iterator[Aloud]:
    """While inside, what is printed goes to the error stream, every line once, or nowhere while `silent`. What is given makes of a
    function of ours one that prints as always."""
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
        with suppress(ValueError, OSError):  # nobody listens any more
            said.end(failed)
