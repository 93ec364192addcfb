"""Suggest the name that a user may have meant. Imports nothing heavy, so that misspellings are reported at once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The known name that is most similar to a word; empty if none is.

    >>> nearest("--widht", ["--width", "--depth"]), nearest("Train", ["plan", "train"]), nearest("xyz", ["plan"])
    ('--width', 'train', '')
    """
    from difflib import get_close_matches

    names = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word; empty if nothing is similar.

    >>> did_you_mean("trian", ["plan", "train"])
    '; did you mean train?'
    """
    found = nearest(word, known)
    return f"; did you mean {found}?" if found else ""
