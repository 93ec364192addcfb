"""The state of a federated run so far: its request, the rounds that count, and comparisons of its model with others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.files.codec import Unreadable, from_json
from shoestring.federated.events import RoundFinished
from shoestring.federated.options import FederateOptions
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder, Unusable

NOTHING_ASKED = FederateOptions()
COMPARISONS = "comparisons.json"  # file in a run's folder with comparisons of its model


@dataclass(frozen=True)
class ABRow:
    """Run 1 against run 2 in one metric, on the devices of a group; None: measured by too few devices."""

    metric: str
    group: str = ""
    one: float | None = None
    other: float | None = None
    delta_percent: float | None = None
    low: float | None = None  # interval of the difference, in percent
    high: float | None = None
    devices: int | None = None
    verdict: str = ""


@dataclass(frozen=True)
class ABTable:
    title: str = "Run 1 against run 2"
    rows: tuple[ABRow, ...] = ()


@dataclass(frozen=True)
class ABTables:
    """The content of the comparisons file."""

    comparisons: tuple[ABTable, ...] = ()


@dataclass(frozen=True)
class FederationReport:
    asked: FederateOptions = NOTHING_ASKED
    rounds: tuple[RoundFinished, ...] = ()
    comparisons: tuple[ABTable, ...] = ()

    @property
    def private(self) -> bool | None:
        """None: no epsilon was requested; False: one was, but the noise followed from a seed, so nothing is private."""
        return None if self.asked.epsilon is None else self.asked.insecure_seed is None

    @property
    def up(self) -> int:
        """Bytes sent by all devices in all rounds."""
        return sum(one.up for one in self.rounds)

    @property
    def down(self) -> int:
        return sum(one.down for one in self.rounds)

    @property
    def missing(self) -> int:
        return sum(one.missing for one in self.rounds)

    @property
    def rejections(self) -> list[tuple[int, str, str]]:
        """Rejected updates: round, device and reason."""
        return [(one.step, name, why) for one in self.rounds for name, why in one.rejected]

    @property
    def away(self) -> list[tuple[str, int]]:
        """Missing devices with the number of rounds they missed, most first; only devices whose names were noted."""
        return Counter(name for one in self.rounds for name in one.missing_names).most_common()


def federation_report(asked: Mapping[str, Any], history: History, folder: Folder) -> FederationReport:
    """Raises Unreadable if the request is impossible."""
    options = from_json(FederateOptions, asked, unknown="ignored")
    return FederationReport(options, tuple(history.of_kind(RoundFinished)), comparisons_in(folder))


def comparisons_in(folder: Folder) -> tuple[ABTable, ...]:
    """Comparisons of a run's model. An unreadable file counts as missing, because the comparison can be made again."""
    try:
        return from_json(ABTables, folder.read(COMPARISONS), unknown="ignored").comparisons
    except (Unusable, Unreadable):
        return ()
