"""The standard streams of a process of ours, whatever the one who started it made of them. What is printed never ends a training.

    closed (a daemon's, `>&-`)            leads nowhere
    a pipe that nobody reads (`| head`)   leads nowhere from then on
    a full disk (`>/dev/full`)            the same; `output_trouble` says so in the end
    an encoding without our characters    writes others instead

No torch, and nothing slow to import: commands and workers begin with it.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TextIO

PLAIN = {"…": "...", "█": "#", "░": ".", "·": "-", "→": "->"}  # for terminals that have no other characters


class SteadyFile(io.FileIO):
    """A standard stream's file. After a write that failed, it takes everything and writes nothing."""

    def __init__(self, file: int) -> None:
        super().__init__(file, "w", closefd=False)
        self.trouble: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while self.trouble is None:
                written = super().write(data)
                if written is not None:
                    return written
                select.select([], [self], [])  # a stream that does not block, and is full for now
        except OSError as error:
            self.trouble = error
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Let this process print whatever it wants from now on. Streams that somebody else put there (a test, a notebook) stay."""
    for _ in closed_files():
        os.open(
            os.devnull, os.O_RDWR
        )  # gets the lowest number: else the next file would, and what is printed would go there
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = steady_stream(sys.stdout, 1)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = steady_stream(sys.stderr, 2)  # type: ignore[misc]
    for stream in (sys.stdout, sys.stderr):
        speak_plainly(stream)


def closed_files() -> list[int]:
    """Those of the files 0, 1 and 2 that are not open."""
    closed = []
    for file in (0, 1, 2):
        try:
            os.fstat(file)
        except OSError:
            closed.append(file)
    return closed


@contextmanager
def standard_files() -> Iterator[None]:
    """While inside, files 0, 1 and 2 are open, so that no pipe to another process gets their number."""
    opened = [os.open(os.devnull, os.O_RDWR) for _ in closed_files()]
    try:
        yield
    finally:
        for file in opened:
            os.close(file)


def steady_stream(stream: TextIO | None, file: int) -> io.TextIOWrapper:
    """A stream to the same file that never fails."""
    raw = SteadyFile(file)
    if not isinstance(stream, io.TextIOWrapper):  # None: it was closed when Python started
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=file == 2)
    with suppress(OSError, ValueError):
        stream.flush()
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def output_trouble() -> OSError | None:
    """Why something that was printed did not arrive; None if all did, as far as this process knows."""
    stream = sys.stdout
    stream.flush()
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer
    return raw.trouble if isinstance(raw, SteadyFile) else None


def speak_plainly(stream: TextIO) -> None:
    """Let a stream take every text we write, whatever its encoding: what it has no character for is written with others. A locale that is
    C has ASCII alone, though Python takes it for UTF-8."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    if not isinstance(stream, io.TextIOWrapper) or (
        stream.encoding.lower() in ("utf-8", "utf8") and locale not in ("C", "POSIX")
    ):
        return

    def replaced(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError), "only writing is mended"
        return "".join(
            PLAIN.get(one) or one.encode("ascii", "backslashreplace").decode()
            for one in error.object[error.start : error.end]
        ), error.end

    codecs.register_error("shoestring", replaced)
    stream.reconfigure(encoding="ascii" if locale in ("C", "POSIX") else stream.encoding, errors="shoestring")
