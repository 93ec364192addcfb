"""The two ways a user can be told no: a mistake to mend, or a budget that can't be met."""
from __future__ import annotations

ABOUT_A_BLOCK = "the block "   # how a Mistake begins that says that a block of the model can't be computed again


class Mistake(ValueError):
    """What the user gave can't work; the text says what was found, why, and what to do."""


class OverBudget(ValueError):
    """Nothing fits the budget; `nearest` is the least demanding plan there is."""

    def __init__(self, text: str, nearest: object = None) -> None:
        super().__init__(text)
        self.nearest = nearest
