"""Bodies of requests, from a file that has one a line."""

from __future__ import annotations

from shoestring.core.errors import Mistake

MOST_BYTES = 1 << 30  # of a file of bodies


def bodies_in(file: str) -> list[bytes]:
    """The lines of a file."""
    import os
    import stat

    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise Mistake(f"{file} is no file of bodies: give a text file, a JSON body a line")
        with open(file, "rb") as opened:
            bodies = [line.strip() for line in opened if line.strip()]
    except OSError as error:
        raise Mistake(f"{file} can't be read ({error.strerror}): give a file with a JSON body a line") from error
    if not bodies:
        raise Mistake(f'{file} is empty: give a JSON body a line, such as {{"text": "hello"}}')
    return bodies
