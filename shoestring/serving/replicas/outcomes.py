"""Why a request gets no answer."""

from __future__ import annotations

from math import inf


class Unanswered(Exception):
    """The base; its text is for the client."""


class TurnedAway(Unanswered):
    """It could not be answered in time: come again after so many seconds; infinity: it will never be."""

    def __init__(self, text: str, retry_after: float = inf) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class TooLate(Unanswered):
    """Its deadline passed while it waited."""


class InputRefused(Unanswered):
    """The model does not take it."""


class ComputationFailed(Unanswered):
    """The model failed on it, or its process died more than once."""
