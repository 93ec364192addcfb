"""The state of a run as the page shows it: a word, a colour and the reason. A run is not fine just because it ended.

diverged      the last loss is NaN; or the loss ended far above its start: comparing the first and last tenth of the steps (3 to 50
              each), the minimum of the last is above the maximum of the first, and the median of the last is more than twice as
              high. A loss may rise for good reasons, so the text says what was seen, not what it means
data ended    the data had fewer batches than planned steps
ended early   validation did not improve for as long as the job waits
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import median

from shoestring.core.units import about, bytes_text
from shoestring.runs.events.event import DATA_ENDED
from shoestring.runs.reports.report import Report
from shoestring.show.page.room_page import ask_room, page_of
from shoestring.show.page.words import (
    ENDED_EARLY,
    STATES,
    loss_text,
    number,
    numbers,
    seconds_left,
    shorten,
    state_of,
    step_word,
    verb_of,
)

NO_BETTER = "no better"  # prefix of `why_ended` if validation did not improve for long


@dataclass(frozen=True)
class RunStatus:
    tone: str  # a CSS class: the state, or diverged, data-ended, early
    word: str
    why: str = ""  # a sentence; empty if nothing needs explaining


def standing(report: Report) -> RunStatus:
    """The state to show for a run."""
    state, text = state_of(report), sentence_case(report.text.strip())
    if state in ("failed", "died"):
        return RunStatus(state, STATES[state], text)
    if found := divergence_text(report):
        return RunStatus("diverged", "Diverged", f"{found} {text}".strip())
    ended = why_ended(report)
    if state == "finished" and ended == DATA_ENDED:
        return RunStatus(
            "data-ended",
            "Data ended",
            f"The data ended after {counted_steps(report)}. To go through them again, give data "
            "that can be iterated more than once, such as a list or a DataLoader.",
        )
    if state == "finished" and ended.startswith(NO_BETTER):
        return RunStatus("early", "Ended early", "")
    if (
        state == "finished" and page_of(report).fewer_is_early and taken_steps(report) < report.steps
    ):  # `ended` says why
        return RunStatus("early", "Ended early", text)
    word = verb_of(report).going.capitalize() if state == "running" else STATES.get(state, "")
    return RunStatus(state, word, text)


def divergence_text(report: Report) -> str:
    """What was seen of a diverging loss; empty if it did not diverge.

    >>> from shoestring.runs.reports.report import Curves
    >>> def seen(losses): return divergence_text(Report(curves=Curves(range(1, len(losses) + 1), losses)))
    >>> seen([2.0, 1.0, float("nan"), float("nan")])
    'The loss has not been finite since step 3.'
    >>> seen([2.0] * 10 + [9.0] * 10), seen([2.0, 1.9, 2.1] * 10)
    ('The loss ended at 9.000, far above the 2.000 it began with.', '')
    """
    losses = report.curves.losses
    known = numbers(losses)
    if losses and not isfinite(losses[-1]):
        place = next((place for place in range(len(losses) - 1, -1, -1) if isfinite(losses[place])), -1) + 1
        return f"The loss has not been finite since {step_word(report)} {report.curves.numbers[place]:,}."
    count = max(3, min(50, len(known) // 10))
    if len(known) < 2 * count:
        return ""
    first, last = known[:count], known[-count:]
    before, now = median(first), median(last)
    if min(last) > max(first) and now - before > abs(before):
        ends = "stands" if state_of(report) == "running" else "ended"
        return f"The loss {ends} at {loss_text(now)}, far above the {loss_text(before)} it began with."
    return ""


def why_ended(report: Report) -> str:
    return DATA_ENDED if report.state == DATA_ENDED else report.why_ended


def taken_steps(report: Report) -> int:
    return report.step or report.steps or len(report.curves.losses)


def counted_steps(report: Report) -> str:
    """Number of steps done, and of how many if not all."""
    taken, wanted = taken_steps(report), report.steps
    of = f" of {wanted:,}" if wanted > taken else ""
    return f"{taken:,}{of} {step_word(report)}{'s' * ((wanted if of else taken) != 1)}"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def headline(report: Report) -> str:
    """The run's progress in one sentence.

    >>> from shoestring.runs.reports.report import Curves
    >>> headline(Report(state="running", step=3, steps=10, curves=Curves(seconds=[2.0] * 3)))
    'Step 3 of 10, about 14 s left.'
    >>> headline(Report(state="died", step=3, steps=10))
    'Died at step 3 of 10.'
    """
    state, step, steps = state_of(report), report.step, report.steps
    budget, left, verb = report.memory, seconds_left(report), verb_of(report)
    if state == "planning":
        return (
            f"Planning how to {verb.base} inside {bytes_text(budget)}." if budget else f"Planning how to {verb.base}."
        )
    word = step_word(report)
    place = f"{word} {step:,} of {steps:,}" if steps else f"{word} {step:,}"
    if state == "running" and not step:
        return f"The first {word} runs."
    if state == "running":
        return place.capitalize() + (f", about {about(left)} left." if left else ".")
    if state in ENDED_EARLY:
        return f"{STATES[state]} at {place}." if step else f"{STATES[state]} before the first {word}."
    return verdict(report)


def verdict(report: Report) -> str:
    """The run's result in one sentence.

    >>> from shoestring.runs.request import Request
    >>> asked = Request(job="gpt", memory=600 << 20, room="training")
    >>> verdict(Report(step=40, steps=40, request=asked, measured={"process_bytes": 500 << 20}))
    'Trained 40 steps inside 600 MiB.'
    >>> verdict(Report(step=300, steps=900, request=asked, why_ended="no better for 3 validations"))
    'Trained 300 of 900 steps: no better for 3 validations.'
    """
    used, budget = number(report.measured.get("process_bytes")), report.memory
    plain = report.plan.plain.get("process_bytes")
    steps, ended = taken_steps(report), why_ended(report)
    if not steps and used is None:
        return "Nothing was measured in this run."
    sentence: str = verb_of(report).done.capitalize() + (f" {counted_steps(report)}" if steps else "")
    if divergence_text(report):
        return f"{sentence}, but the loss diverged."
    if ended == DATA_ENDED:
        return f"{sentence}: the data ended."
    if ended.startswith(NO_BETTER):
        return f"{sentence}: {shorten(ended, 60)}."
    by_itself = ended in ("", "steps", "epochs", f"{step_word(report)}s")  # it did all it was to do
    why = "" if by_itself else shorten(ended, 60)
    for ending in ask_room(report, str, lambda room: [room.ending(report.of_room, why)]):
        return f"{sentence}{ending}."
    if used is not None and budget is not None:
        over = f", but reached {bytes_text(used)}, above the budget of {bytes_text(budget)}"
        sentence += f" inside {bytes_text(budget)}" if used <= budget else over
    elif used is not None or budget is not None:
        sentence += f" in {bytes_text(used)}" if used is not None else f" with a budget of {bytes_text(budget or 0)}"
    if plain is not None and used is not None and plain > used and report.plan.techniques:  # else nothing to boast of
        sentence += f"; {page_of(report).plain.lower()} would have needed {bytes_text(plain)}"
    return sentence + "."
