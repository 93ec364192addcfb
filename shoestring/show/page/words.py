"""What the page says, and how it reads the figures it says it with: anything may be missing, nothing may be markup."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from math import isfinite
from operator import itemgetter
from typing import Any, Protocol

from markupsafe import Markup

from shoestring.runs import time_left
from shoestring.show.page.render import NONE, said
from shoestring.show.page.room_page import page_of, said_by_room

STATES = {
    "planning": "Planning",
    "training": "Training",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "died": "Died",
    "data ended": "Data ended",
}
ENDED_EARLY = ("stopped", "failed", "died")


Entries = Mapping[
    str, Any
]  # a report or a part of it by its keys (see runs.report); any may be missing, and hold anything


class HasJson(Protocol):
    def as_json(self) -> dict[str, Any]: ...


def as_mapping(report: Entries | HasJson) -> Entries:
    """A report by its keys, whether it comes as JSON or as a value."""
    return report if isinstance(report, Mapping) else report.as_json()


# Reading


def inner(story: Entries, key: str) -> Entries:
    """The dict below `key`, empty if there is none."""
    found = story.get(key)
    return found if isinstance(found, Mapping) else {}


def number(value: object) -> float | None:
    """The value if one can calculate with it.

    >>> number(3), number(float("nan")), number(None), number(True)
    (3, None, None, None)
    >>> number(10**400)   # no float holds it
    """
    try:
        return value if isinstance(value, (float, int)) and not isinstance(value, bool) and isfinite(value) else None
    except OverflowError:
        return None


def numbers(found: object) -> list[float]:
    """The entries of a list that one can calculate with.

    >>> numbers([1.0, None, float("inf"), 2])
    [1.0, 2]
    """
    entries = listed(found)
    return entries if all_numbers(entries) else [entry for entry in entries if number(entry) is not None]


def listed(found: object) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else []


def all_numbers(entries: Iterable[Any]) -> bool:
    """Whether one can calculate with all of them: a sum tells it sooner than a look at each."""
    try:
        return isfinite(sum(entries))
    except (TypeError, OverflowError):
        return False


def pairs(found: object) -> list[tuple[Any, float]]:
    """The [anything, number] entries of a list."""
    entries = listed(found)
    if all_numbers(map(itemgetter(1), entries)):
        return entries
    return [(first, second) for first, second in entries if number(second) is not None]


def dicts(found: object) -> list[Entries]:
    """The dicts in a list."""
    return [entry for entry in listed(found) if isinstance(entry, Mapping)]


def figure_of(story: Entries, key: str, name: str) -> float | None:
    return number(inner(story, key).get(name))


def whole(story: Entries, key: str) -> int:
    return int(number(story.get(key)) or 0)


def state_of(story: Entries) -> str:
    """One of STATES, or nothing where the story does not say. A run whose data ended is finished; `standing` tells it apart."""
    state = story.get("state")
    return ("finished" if state == "data ended" else state) if isinstance(state, str) and state in STATES else ""


def step_word(story: Entries) -> str:
    """What a run counts: steps, or what its room calls them."""
    return page_of(story).counts


def flags_of(story: Entries) -> dict[str, object]:
    """What a run was made with: the job's arguments, or the flags that were given where nobody noted those, and what its
    room was asked for.

    >>> flags_of({"flags": {"width": 8}})
    {'width': 8}
    """
    of_room = said_by_room(story, lambda room: room.flags(story).items())
    return {**(inner(story, "arguments") or inner(story, "flags")), **dict(of_room)}


def short(value: float) -> str:
    """A number in few characters.

    >>> short(4.0), short(1e-6)
    ('4', '1e-6')
    """
    return f"{value:g}".replace("e-0", "e-")


def warnings_in(story: Entries) -> int:
    return sum(event.get("event") == "warning" for event in dicts(story.get("events")))


# Saying


def shortened(text: str, most: int) -> str:
    """
    >>> shortened("forward", 5)
    'forw…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def tidy(text: str) -> str:
    """A tick's text without zeros that say nothing.

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


def counted(count: int, word: str) -> str:
    """
    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {word}{'s' * (count != 1)}"


def clock(when: object, now: object = None) -> str:
    """The time of day; with the day if it is not that of `now`."""
    moment, other = (number(one) for one in (when, now))
    if moment is None or not 0 <= moment < 4e9:
        return NONE
    there = time.localtime(moment)
    same = other is not None and 0 <= other < 4e9 and time.localtime(other)[:3] == there[:3]
    return time.strftime("%H:%M:%S" if same else f"{there.tm_mday} %b %H:%M", there)


def loss_text(loss: float) -> str:
    """
    >>> loss_text(2.5), loss_text(0.000123456), loss_text(1234567.0)
    ('2.500', '0.0001235', '1.235e+06')
    """
    return f"{loss:#.4g}"


# Where it stands


def job_text(story: Entries) -> Markup:
    """What the job is called: its file without folder and ending, whichever way it was given.

    >>> str(job_text({"job": "jobs/gpt.py"})), str(job_text({"job": "gpt"})), str(job_text({}))
    ('gpt', 'gpt', 'training run')
    """
    name = str(story.get("job") or story.get("name") or "training run")
    return said(name.removesuffix(".py").rpartition("/")[2] if name.endswith(".py") else name, 80)


def numbers_of_steps(story: Entries) -> list[int]:
    """The number of the step that each loss is of."""
    losses, found = listed(story.get("losses")), listed(story.get("step_numbers"))
    fit = len(found) == len(losses) and all_numbers(found)
    return [int(step) for step in found] if fit else list(range(1, len(losses) + 1))


def step_seconds(story: Entries) -> float | None:
    """Seconds of the median step: the one speed that a page tells. Before it is a measured figure, it is that of the last steps."""
    found = figure_of(story, "measured", "step_seconds")
    return found if found is not None and found > 0 else time_left.pace(lately(story))


def lately(story: Entries) -> list[float]:
    """Seconds of the last steps, as many as are asked for how fast it is."""
    return numbers(listed(story.get("seconds"))[-time_left.RECENT - time_left.YOUNG :])


def seconds_left(story: Entries) -> float | None:
    """Seconds until the last step is done, as the terminal says it too."""
    done = [
        (whole(one, "step"), float(one["seconds"]))
        for one in dicts(story.get("events"))
        if one.get("event") == "validated" and number(one.get("seconds")) is not None
    ]
    return time_left.time_left(whole(story, "step"), whole(story, "steps"), lately(story), done)


def share_done(story: Entries) -> float | None:
    steps = whole(story, "steps")
    return min(1.0, whole(story, "step") / steps) if steps > 0 and "step" in story else None


def rate_unit(per_second: float, word: str = "step") -> tuple[float, str]:
    """How many of these fit a second, and what to call them, so that the rate is not a tiny number.

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
