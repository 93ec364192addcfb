"""How long planning takes on this machine, from earlier plannings; kept beside the machine's other figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shoestring.measure.cache import read_cached, write_cached
from shoestring.measure.probe import hardware_file

MOST = 100  # number of plannings that are kept


@dataclass(frozen=True)
class PlanningSeconds:
    seconds: dict[str, float]  # by question, the latest last


def seconds_file() -> Path:
    return hardware_file().with_name("planning-seconds.json")


def expected_seconds(question: Path) -> float | None:
    """Seconds that planning took the last time for this question (`earlier.place_of`); else the median over other
    plannings."""
    found = kept_seconds()
    return found.get(question.stem) or (median(found.values()) if found else None)


def remember_seconds(question: Path, seconds: float) -> None:
    found = kept_seconds()
    found.pop(question.stem, None)
    write_cached(seconds_file(), PlanningSeconds(dict([*found.items(), (question.stem, seconds)][-MOST:])))


def kept_seconds() -> dict[str, float]:
    found = read_cached(seconds_file(), PlanningSeconds)
    return found.seconds if found is not None else {}
