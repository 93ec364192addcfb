"""argparse as we use it: light to import, help as wide as the terminal, and every error a sentence of ours."""
from __future__ import annotations

import argparse
import os

from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


class Formatter(argparse.HelpFormatter):
    """argparse's own imports a dozen modules to learn how wide the terminal is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=help_width())


def help_width() -> int:
    """Characters of a line of help."""
    try:
        return os.get_terminal_size().columns - 2
    except OSError:
        return 78


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=Formatter)

    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message}; see {self.prog} --help")
