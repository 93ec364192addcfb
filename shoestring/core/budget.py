"""The budget: the limits that the user sets. Parsed in one place, and checked in one place, against figures.

A limit belongs to one figure by name. The check is the same whatever a room limits (bytes that a phone uploads, the
latency of an answer). A figure that is not known breaks no limit, so the planner refuses limits on figures that a cost
lacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from shoestring.core.errors import Mistake
from shoestring.core.units import DECIMAL, parse_bytes, parse_seconds, unit_text

if TYPE_CHECKING:
    from collections.abc import Mapping


PERCENTILE = 0.99  # of answers that a latency limits, unless another is asked for


def limit(figure: str, unit: str, least: bool = False) -> Any:
    """A limit on a figure: an upper bound, or with `least` a lower bound."""
    return field(default=None, metadata={"figure": figure, "unit": unit, "least": least})


@dataclass(frozen=True)
class Budget:
    """The user's limits; None: not limited. `Budget.parse` reads them as they are written."""

    memory: int | None = limit("process_bytes", "bytes")  # most bytes of a process
    seconds: float | None = limit("total_seconds", "seconds")  # for the whole job
    devices: int | None = limit("world", "")  # that compute together
    up: int | None = limit("up_bytes", "bytes")  # that a device uploads in a round,
    down: int | None = limit("down_bytes", "bytes")  # and downloads
    epsilon: float | None = limit("epsilon", "")  # privacy loss, with
    delta: float | None = limit("delta", "")  # this probability of a greater one
    size: int | None = limit("size_bytes", DECIMAL)  # of the model on disk
    latency: float | None = limit("latency_seconds", "seconds")  # of an answer, at
    percentile: float = PERCENTILE  # this percentile
    quality: float | None = limit("quality", "share", least=True)  # least acceptable quality
    throughput: float | None = limit("requests_per_second", "requests/s", least=True)  # least that are answered

    @classmethod
    def parse(cls, **written: str | float | None) -> Budget:
        """The budget from a user's text: 600MiB, 5ms, 0.998.

        >>> Budget.parse(memory="600MiB", latency="5ms").memory
        629145600
        """
        units = {one.name: one.metadata.get("unit", "") for one in fields(cls)}
        entries: dict[str, Any] = {
            name: value_of(name, units[name], one) for name, one in written.items() if one is not None
        }
        return cls(**entries)

    def limits(self) -> tuple[Limit, ...]:
        """The limits that were set."""
        return limits_of(self)

    def broken_limits(self, numbers: Mapping[str, float | None], slack: float = 1.0) -> list[BrokenLimit]:
        """The limits that these figures, by name, break; with `slack` they may be exceeded by this factor.

        >>> [str(one) for one in Budget(memory=1000).broken_limits({"process_bytes": 1500})]
        ['memory: 1.46 KiB, 500 B more than 1,000 B']
        """
        found = ((limit, numbers.get(limit.figure)) for limit in self.limits())
        return [
            BrokenLimit(limit, value) for limit, value in found if value is not None and not limit.keeps(value, slack)
        ]

    def unknown_limits(self, numbers: Mapping[str, float | None]) -> list[Limit]:
        """The limits on figures that these lack, which nobody can check.

        >>> [one.name for one in Budget(memory=1000, latency=0.1).unknown_limits({"process_bytes": 1500})]
        ['latency']
        """
        return [limit for limit in self.limits() if numbers.get(limit.figure) is None]

    def share_used(self, numbers: Mapping[str, float | None]) -> float:
        """The largest fraction of a limit that these figures use; above 1 a limit is broken.

        >>> Budget(memory=1000, quality=0.9).share_used({"process_bytes": 500, "quality": 0.95}).__round__(3)
        0.947
        """
        found = ((limit, numbers.get(limit.figure)) for limit in self.limits())
        return max((limit.share_used(value) for limit, value in found if value is not None), default=0.0)


@cache
def limits_of(budget: Budget) -> tuple[Limit, ...]:
    """Cached, because a ranking asks for each of thousands of candidates."""
    values = ((one, vars(budget)[one.name]) for one in fields(budget) if one.metadata)
    return tuple(
        Limit(one.name, one.metadata["figure"], one.metadata["unit"], value, one.metadata["least"])
        for one, value in values
        if value is not None
    )


@dataclass(frozen=True)
class Limit:
    name: str  # of the budget's field
    figure: str  # name of the limited figure
    unit: str
    value: float
    least: bool  # whether it is a lower bound

    def keeps(self, found: float, slack: float = 1.0) -> bool:
        return found * slack >= self.value if self.least else found <= self.value * slack

    def share_used(self, found: float) -> float:
        """The fraction of the limit that is used; for a lower bound, needed / found."""
        whole, part = (found, self.value) if self.least else (self.value, found)
        return part / whole if whole else (1.0 if part == whole else float("inf"))


@dataclass(frozen=True)
class BrokenLimit:
    """A broken limit."""

    limit: Limit
    found: float

    def __str__(self) -> str:
        one, by = self.limit, abs(self.found - self.limit.value)
        than = "less" if one.least else "more"
        return f"{one.name}: {unit_text(self.found, one.unit)}, {unit_text(by, one.unit)} {than} than {unit_text(one.value, one.unit)}"


def value_of(name: str, unit: str, written: str | float) -> float:
    if not isinstance(written, str) and (
        not isfinite(written) or (unit in ("bytes", DECIMAL, "seconds") and written <= 0)
    ):
        raise Mistake(
            f"{name}={written} is no limit: give a finite number{' above zero' * (unit in ('bytes', 'seconds'))}"
        )
    if unit in ("bytes", DECIMAL):
        return parse_bytes(written if isinstance(written, str) else int(written))
    if unit == "seconds":
        return parse_seconds(written) if isinstance(written, str) else float(written)
    percent = unit == "share" and isinstance(written, str) and written.rstrip().endswith("%")
    try:
        value = float(str(written).rstrip().rstrip("%")) / 100 if percent else float(written)
    except ValueError:
        raise Mistake(f"{name}={written!r} is not a number") from None
    if (
        not isfinite(value)
        or value < 0
        or (unit == "share" and value > 1)
        or (name == "percentile" and not 0 < value < 1)
    ):
        raise Mistake(
            f"{name}={written}: give a number {'from 0 to 1' if unit == 'share' or name == 'percentile' else 'of zero or more'}"
        )
    return int(value) if name == "devices" else value


def parsed_latency(written: str) -> tuple[str, float]:
    """
    >>> parsed_latency("20ms@50%"), parsed_latency("20ms@0.999")
    (('20ms', 0.5), ('20ms', 0.999))
    """
    found = re.fullmatch(r"\s*([^@\s]+)\s*@\s*([0-9.]+)\s*(%?)\s*", written)
    try:
        share = float(found[2]) / (100 if found[3] else 1) if found else 0.0
    except ValueError:
        share = 0.0
    if found is None or not 0 < share < 1:
        raise Mistake(f"--latency {written}: give a time and a percentile, such as 20ms@95%")
    return found[1], share
