"""What a load test makes of its answers."""

from __future__ import annotations

import numpy as np

from shoestring.serving.load.command import rows
from shoestring.serving.load.outcome import LoadAnswer, due_times, outcome_of


def test_who_could_not_be_sent_in_time_waited() -> None:
    """A server that stands still for a second lets all wait who came then, not only the one that it was answering."""
    answers = [LoadAnswer(due, max(due + 0.01, 2.0), 200) for due in (1.0, 1.2, 1.4, 1.6, 1.8)]
    assert dict(outcome_of(answers, 5).percentiles)[0.5] == 0.6000000000000001


def test_refusals_and_failures_are_no_answers() -> None:
    answers = [
        LoadAnswer(0, 1, 200),
        *[LoadAnswer(0, 0.001, 503)] * 3,
        LoadAnswer(0, 9, 0, "TimeoutError"),
        LoadAnswer(0, 9, 500),
    ]
    found = outcome_of(answers, 2)
    assert (found.answered, found.refused, found.failed) == (1, 3, 2)
    assert dict(found.percentiles)[0.999] == 1 and found.refusal_seconds == 0.001
    assert ["failed", "1: HTTP 500"] in rows(found)


def test_nothing_answered_has_no_percentile() -> None:
    assert outcome_of([LoadAnswer(0, 1, 500)], 1).percentiles == () and outcome_of([], 1).answered_rate == 0


def test_requests_come_at_their_rate_and_at_random() -> None:
    times = np.array(due_times(200, 50, 3))
    gaps = np.diff(times)
    assert abs(len(times) / 50 / 200 - 1) < 0.03 and abs(gaps.std() / gaps.mean() - 1) < 0.05
    assert due_times(200, 50, 3) == times.tolist() and due_times(200, 50, 4) != times.tolist()
