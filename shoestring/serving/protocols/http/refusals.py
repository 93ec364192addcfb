"""Requests that are answered with an error: the status, what was wrong, and in which field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoestring.core.errors import Mistake
from shoestring.serving.replicas.outcomes import ComputationFailed, InputRefused, TooLate, TurnedAway, Unanswered
from shoestring.serving.replicas.repository import UnknownModel

LONGEST_RETRY = 3600


class RefusedRequest(Exception):
    def __init__(self, status: int, text: str, field: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.field, self.headers = status, text, field, dict(headers or {})


def wrong(field: str, text: str) -> RefusedRequest:
    """A field that can't be used: 400."""
    return RefusedRequest(400, text, field)


@dataclass(frozen=True)
class ErrorAnswer:
    status: int
    text: str  # with the field in front
    field: str
    headers: Mapping[str, str]


def error_answer(error: Exception) -> ErrorAnswer | None:
    """What a client is told; None if the error is a fault of ours."""
    if isinstance(error, RefusedRequest):
        text = f"{error.field}: {error.text}" if error.field else error.text
        return ErrorAnswer(error.status, text, error.field, error.headers)
    if isinstance(error, UnknownModel):
        return ErrorAnswer(404, str(error), "model", {})
    if isinstance(error, Mistake):  # a model that can't be loaded
        return ErrorAnswer(503, str(error), "", {})
    if not isinstance(error, Unanswered):
        return None
    status, headers = status_of(error)
    return ErrorAnswer(status, str(error), "", headers)


def status_of(error: Unanswered) -> tuple[int, Mapping[str, str]]:
    """
    >>> status_of(TurnedAway("busy", 2.1)), status_of(TooLate("late"))
    ((503, {'Retry-After': '3'}), (504, {}))
    """
    if isinstance(error, TurnedAway):
        if math.isinf(error.retry_after):
            return 503, {}
        return 503, {"Retry-After": str(min(max(math.ceil(error.retry_after), 1), LONGEST_RETRY))}
    if isinstance(error, TooLate):
        return 504, {}
    if isinstance(error, InputRefused):
        return 400, {}
    assert isinstance(error, ComputationFailed), "these are all kinds"
    return 500, {}
