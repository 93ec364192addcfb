"""The parts of rich that draw tables and text.

Importing rich draws from Python's global random generator; its state is restored, because printing a plan must not
change what a script draws next.
"""

import random

before = random.getstate()
try:
    from rich.box import Box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(before)

__all__ = ["Box", "Console", "Padding", "Table", "Text"]
