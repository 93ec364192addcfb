"""What a federated run came to so far: what was asked for, its rounds that count, and what its model was compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.codec import Unreadable, from_json
from shoestring.federated.events import RoundFinished
from shoestring.federated.options import FederateOptions
from shoestring.runs.folder import Folder, Unusable
from shoestring.runs.history import History

NOTHING_ASKED = FederateOptions()
COMPARISONS = "comparisons.json"  # in a run's folder: what its model was compared with


@dataclass(frozen=True)
class ABRow:
    """Run 1 against run 2 by a metric, on the devices of a group; None: too few devices know it."""

    metric: str
    group: str = ""
    one: float | None = None
    other: float | None = None
    delta_percent: float | None = None
    low: float | None = None  # the interval of the difference, in percent
    high: float | None = None
    devices: int | None = None
    verdict: str = ""


@dataclass(frozen=True)
class ABTable:
    title: str = "Run 1 against run 2"
    rows: tuple[ABRow, ...] = ()


@dataclass(frozen=True)
class ABTables:
    """The file of comparisons."""

    comparisons: tuple[ABTable, ...] = ()


@dataclass(frozen=True)
class FederationReport:
    asked: FederateOptions = NOTHING_ASKED
    rounds: tuple[RoundFinished, ...] = ()
    comparisons: tuple[ABTable, ...] = ()

    @property
    def private(self) -> bool | None:
        """None: no epsilon was asked for; False: one was, and the noise followed from a seed, so it means nothing."""
        return None if self.asked.epsilon is None else self.asked.insecure_seed is None

    @property
    def up(self) -> int:
        """Bytes that all devices sent in all rounds."""
        return sum(one.up for one in self.rounds)

    @property
    def down(self) -> int:
        return sum(one.down for one in self.rounds)

    @property
    def missing(self) -> int:
        return sum(one.missing for one in self.rounds)

    @property
    def turned_away(self) -> list[tuple[int, str, str]]:
        """Updates that could not be used: the round, whose, and why."""
        return [(one.step, name, why) for one in self.rounds for name, why in one.rejected]

    @property
    def away(self) -> list[tuple[str, int]]:
        """Devices that were missing and in how many rounds, most often first, of those whose names were noted."""
        return Counter(name for one in self.rounds for name in one.missing_names).most_common()


def federation_report(asked: Mapping[str, Any], history: History, folder: Folder) -> FederationReport:
    """Raises Unreadable where what was asked for can't be."""
    options = from_json(FederateOptions, asked, unknown="ignored")
    return FederationReport(options, tuple(history.of_kind(RoundFinished)), comparisons_in(folder))


def comparisons_in(folder: Folder) -> tuple[ABTable, ...]:
    """What a run's model was compared with; a file that can't be read is as good as none: the comparison can be made again."""
    try:
        return from_json(ABTables, folder.read(COMPARISONS), unknown="ignored").comparisons
    except (Unusable, Unreadable):
        return ()
