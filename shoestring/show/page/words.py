"""Texts and figures of a report that several sections of the page use."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from math import isfinite

from markupsafe import Markup

from shoestring.core.rooms import Verb
from shoestring.runs.events import time_left
from shoestring.runs.events.event import Begun, Validated, Warned
from shoestring.runs.reports.report import Report
from shoestring.show.page.render import NONE, escape_cut
from shoestring.show.page.room_page import ask_room, page_of

STATES = {
    "planning": "Planning",
    "running": "Running",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "died": "Died",
    "data ended": "Data ended",
}
ENDED_EARLY = ("stopped", "failed", "died")


def number(value: float | None) -> float | None:
    """The value if it is finite.

    >>> number(3), number(float("nan")), number(None)
    (3, None, None)
    """
    return value if value is not None and isfinite(value) else None


def numbers(found: Iterable[float | None]) -> list[float]:
    """The finite values among these.

    >>> numbers([1.0, None, float("inf"), 2])
    [1.0, 2]
    """
    return [value for value in found if value is not None and isfinite(value)]


def state_of(report: Report) -> str:
    """One of STATES; empty if unknown. A run whose data ended counts as finished; `standing` tells the difference."""
    return "finished" if report.state == "data ended" else report.state


def step_word(report: Report) -> str:
    """What a run's steps are called, such as "round"."""
    return page_of(report).counts


def verb_of(report: Report) -> Verb:
    """What its run does."""
    return page_of(report).verb


def flags_of(report: Report) -> Mapping[str, object]:
    """The job's arguments and the room's options."""
    return {**report.arguments, **dict(ask_room(report, tuple, lambda room: room.flags(report.of_room).items()))}


def short(value: float) -> str:
    """A number in few characters.

    >>> short(4.0), short(1e-6)
    ('4', '1e-6')
    """
    return f"{value:g}".replace("e-0", "e-")


def warnings_in(report: Report) -> int:
    return sum(isinstance(event, Warned) for event in report.events)


# Texts


def shorten(text: str, most: int) -> str:
    """Text shortened to `most` characters.

    >>> shorten("forward", 5)
    'forw…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def tidy(text: str) -> str:
    """A tick's text without superfluous zeros.

    >>> tidy("50.0 MiB"), tidy("5 min 0 s"), tidy("10 s"), tidy("0 B")
    ('50 MiB', '5 min', '10 s', '0')
    """
    return re.sub(r"^0 \w+$", "0", re.sub(r"\.0+(?= )|(?<=\w) 0 (s|min)$", "", text))


def share_text(share: float) -> str:
    """
    >>> share_text(0.31), share_text(0.042), share_text(0.0001)
    ('31 %', '4.2 %', '< 0.1 %')
    """
    return (
        f"{100 * share:.0f} %"
        if share >= 0.0995
        else f"{100 * share:.1f} %"
        if share >= 0.0005
        else "0 %"
        if not share
        else "< 0.1 %"
    )


def count_text(count: int, word: str) -> str:
    """
    >>> count_text(1, "step"), count_text(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {word}{'s' * (count != 1)}"


def clock(when: float | None, now: float = -1.0) -> str:
    """The time of day; with the date if it is not that of `now`."""
    if when is None or not 0 <= when < 4e9:
        return NONE
    there = time.localtime(when)
    same = 0 <= now < 4e9 and time.localtime(now)[:3] == there[:3]
    return time.strftime("%H:%M:%S" if same else f"{there.tm_mday} %b %H:%M", there)


def loss_text(loss: float) -> str:
    """
    >>> loss_text(2.5), loss_text(0.000123456), loss_text(1234567.0)
    ('2.500', '0.0001235', '1.235e+06')
    """
    return f"{loss:#.4g}"


# Progress


def job_text(report: Report) -> Markup:
    """The job's name.

    >>> from shoestring.runs.request import Request
    >>> str(job_text(Report(request=Request(job="jobs/gpt.py")))), str(job_text(Report()))
    ('gpt', 'run')
    """
    return escape_cut(report.job or report.path.name or "run", 80)


def step_seconds(report: Report) -> float | None:
    """Seconds of the median step: the one speed that the page shows. Until it is measured, that of the last steps."""
    return number(report.measured.get("step_seconds")) or time_left.pace(lately(report), together(report))


def together(report: Report) -> int:
    """Batches that come at once, in the run's present life."""
    return next((one.together for one in reversed(report.events) if isinstance(one, Begun)), 1)


def lately(report: Report) -> list[float]:
    """Seconds of the recent steps that determine the present speed."""
    return numbers(report.curves.seconds[-time_left.RECENT - time_left.YOUNG :])


def seconds_left(report: Report) -> float | None:
    """Seconds until the last step is done; the terminal shows the same."""
    done = [(one.step, one.seconds) for one in report.events if isinstance(one, Validated)]
    return time_left.time_left(report.step, report.steps, lately(report), done, together(report))


def share_done(report: Report) -> float | None:
    return min(1.0, report.step / report.steps) if report.steps > 0 else None


def rate_unit(per_second: float, word: str = "step") -> tuple[float, str]:
    """Seconds per unit and the unit's name, chosen so that the rate is not a tiny number.

    >>> rate_unit(3.2), rate_unit(0.02, "round")
    ((1.0, 'steps/s'), (60.0, 'rounds/min'))
    """
    factor, unit = (1.0, "s") if per_second >= 0.5 else (60.0, "min") if per_second >= 0.5 / 60 else (3600.0, "h")
    return factor, f"{word}s/{unit}"


def rate_text(per_second: float, word: str = "step") -> str:
    """
    >>> rate_text(12.34), rate_text(0.05), rate_text(1500, "round")
    ('12.3 steps/s', '3 steps/min', '1,500 rounds/s')
    """
    factor, unit = rate_unit(per_second, word)
    rate = per_second * factor
    return f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"
