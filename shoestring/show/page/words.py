"""What the page says, and how it reads the figures it says it with: anything may be missing, nothing may be markup."""
from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from operator import itemgetter
from statistics import fmean
from typing import Any, Protocol

from markupsafe import Markup

from shoestring.core.units import bytes_text
from shoestring.show.page.render import NONE, said

STATES = {"planning": "Planning", "training": "Training", "finished": "Finished", "stopped": "Stopped", "failed": "Failed",
          "died": "Died"}
ENDED_EARLY = ("stopped", "failed", "died")
Entries = Mapping[str, Any]   # a report or a part of it by its keys (see runs.report); any may be missing, and hold anything


class Report(Protocol):
    def as_json(self) -> dict[str, Any]: ...


def as_mapping(report: Entries | Report) -> Entries:
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
    """
    return value if isinstance(value, (float, int)) and not isinstance(value, bool) and isfinite(value) else None


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
    except TypeError:
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
    """One of STATES, or nothing where the story does not say."""
    state = story.get("state")
    return state if isinstance(state, str) and state in STATES else ""


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


def percent(share: float) -> str:
    """A change, signed.

    >>> percent(0.034), percent(-0.2), percent(0.0001)
    ('+3.4 %', '−20 %', '0 %')
    """
    text = f"{100 * share:+.1f}" if abs(share) < 0.0995 else f"{100 * share:+,.0f}"
    return "0 %" if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}") + " %"


def counted(count: int, word: str) -> str:
    """
    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {word}{'s' * (count != 1)}"


def about(seconds: float) -> str:
    """A time as one says it when it is not exact.

    >>> about(0.2), about(47.3), about(200), about(5000)
    ('1 s', '48 s', '3 min', '1 h 23 min')
    """
    if seconds < 90:
        return f"{max(1, int(seconds + 0.999))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes // 1440} days"


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
    return said(story.get("job") or story.get("name") or "training run", 80)


def pace(story: Entries) -> float | None:
    """Seconds of one step lately; the first two, which warm up, count only where there is little else."""
    taken = numbers((story.get("seconds") or ())[-100:])
    taken = taken[2:] if 4 < len(taken) < 100 else taken
    return fmean(taken) or None if taken else None


def seconds_left(story: Entries) -> float | None:
    one, left = pace(story), whole(story, "steps") - whole(story, "step")
    return one * left if one is not None and left > 0 else None


def share_done(story: Entries) -> float | None:
    steps = whole(story, "steps")
    return min(1.0, whole(story, "step") / steps) if steps > 0 and "step" in story else None


def rate_unit(per_second: float) -> tuple[float, str]:
    """How many of these fit a second, and what to call them, so that the rate is not a tiny number.

    >>> rate_unit(3.2), rate_unit(0.02)
    ((1.0, 'steps/s'), (60.0, 'steps/min'))
    """
    return (1.0, "steps/s") if per_second >= 0.5 else (60.0, "steps/min") if per_second >= 0.5 / 60 else (3600.0, "steps/h")


def rate_text(per_second: float) -> str:
    """
    >>> rate_text(12.34), rate_text(0.05), rate_text(1500)
    ('12.3 steps/s', '3 steps/min', '1,500 steps/s')
    """
    factor, unit = rate_unit(per_second)
    rate = per_second * factor
    return f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"


def headline(story: Entries) -> str:
    """Where it stands, in one sentence.

    >>> headline({"state": "training", "step": 3, "steps": 10, "seconds": [2.0] * 3})
    'Step 3 of 10, about 14 s left.'
    >>> headline({"state": "died", "step": 3, "steps": 10})
    'Died at step 3 of 10.'
    """
    state, step, steps = state_of(story), whole(story, "step"), whole(story, "steps")
    budget, left = figure_of(story, "budget", "memory"), seconds_left(story)
    if state == "planning":
        return f"Planning how to train inside {bytes_text(budget)}." if budget else "Planning how to train."
    place = f"step {step:,} of {steps:,}" if steps else f"step {step:,}"
    if state == "training" and not step:
        return "The first step runs."
    if state == "training":
        return place.capitalize() + (f", about {about(left)} left." if left else ".")
    if state in ENDED_EARLY:
        return f"{STATES[state]} at {place}." if step else f"{STATES[state]} before the first step."
    return verdict(story)


def verdict(story: Entries) -> str:
    """One sentence on how it went.

    >>> verdict({"steps": 40, "budget": {"memory": 600 << 20}, "measured": {"process_bytes": 500 << 20}})
    'Trained 40 steps inside 600 MiB.'
    """
    steps, used = steps_done(story), figure_of(story, "measured", "process_bytes")
    budget, plain = figure_of(story, "budget", "memory"), figure_of(story, "plain", "process_bytes")
    if not steps and used is None:
        return "Nothing was measured in this run."
    sentence = f"Trained {counted(steps, 'step')}" if steps else "Trained"
    if used is not None and budget is not None:
        over = f", but reached {bytes_text(used)}, above the budget of {bytes_text(budget)}"
        sentence += f" inside {bytes_text(budget)}" if used <= budget else over
    elif used is not None or budget is not None:
        sentence += f" in {bytes_text(used)}" if used is not None else f" with a budget of {bytes_text(budget or 0)}"
    if plain is not None and used is not None and plain > used and story.get("techniques"):   # else there is nothing to boast of
        sentence += f"; plain training would have needed {bytes_text(plain)}"
    return sentence + "."


def steps_done(story: Entries) -> int:
    losses: Sequence[object] = story.get("losses") or ()
    return whole(story, "steps") or len(losses)
