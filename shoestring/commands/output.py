"""What commands say beside their result: words for a person, on the error stream, where they are never in the way of --json."""
from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable
    from pathlib import Path


def say(options: Namespace, text: str) -> None:
    """A word for the person in front of the terminal."""
    if sys.stderr.isatty() or not options.json:
        print(text, file=sys.stderr)


def warn(texts: Iterable[str]) -> None:
    """Tell of what is wrong and does not keep us from going on."""
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)


def write_page(place: Path, text: str, asked: bool = False) -> None:
    """A page that can't be written is told of; the run is none the worse."""
    from shoestring.core.files import write_whole

    try:
        write_whole(place, text.encode(), asked)
    except OSError as error:
        warn([f"{place} can't be written: {error.strerror}"])
