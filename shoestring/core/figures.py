"""Figures: named numbers with a unit, predicted and measured, and how we know them.

Whoever shows figures (terminal, page, JSON, report) loops over them. None lists them by hand, so a figure that a new room brings
is shown everywhere, and one that is missing is missing everywhere.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shoestring.core.units import unit_text


@dataclass(frozen=True)
class Quantity:
    """What a figure is a number of."""

    name: str              # its key in JSON, such as process_bytes
    label: str             # what people call it, such as process
    unit: str = "bytes"    # bytes, seconds, share, or the word for what is counted (operations, requests/s)
    counted: bool = False  # predicted to the last one: a difference is told in numbers, not in percent
    optional: bool = False # only shown where it is not zero: a run that sends nothing does not say so

    def text(self, value: float | None) -> str:
        """A number of it for people."""
        return "not known" if value is None else unit_text(value, self.unit)


@dataclass(frozen=True)
class Figure:
    quantity: Quantity
    predicted: float | None = None
    measured: float | None = None
    basis: str = ""        # how the prediction is known: measured on fake tensors, from a trial, a stated bound

    @property
    def off(self) -> float | None:
        """How far the prediction is off, as a share of what was measured; None if either is not known.

        >>> Figure(Quantity("process_bytes", "process"), predicted=110, measured=100).off
        0.1
        """
        if self.predicted is None or self.measured is None:
            return None
        return round(self.predicted / self.measured - 1, 12) if self.measured else 0.0

    @property
    def off_text(self) -> str:
        """The same for people: predicted against measured, in the quantity's own words.

        >>> Figure(Quantity("peak_bytes", "tensors", counted=True), 20_480, 20_472).off_text
        '+8 bytes'
        >>> Figure(Quantity("step_seconds", "a step", "seconds"), 1.0, 1.25).off_text
        '-20.0%'
        """
        if self.off is None:
            return ""
        assert self.predicted is not None and self.measured is not None, "then there is no `off`"
        if self.quantity.counted and abs(self.off) < CLOSE:
            return f"{int(self.predicted - self.measured):+,} {self.quantity.unit}"
        return f"{self.off:+.1%}"

    @property
    def shown(self) -> bool:
        return not self.quantity.optional or bool(self.predicted and self.measured)


CLOSE = 1e-3   # of a counted figure: below that the difference itself says more than a share


@dataclass(frozen=True)
class Figures:
    """Figures by name, in the order in which they are shown."""

    entries: tuple[Figure, ...] = ()

    def __iter__(self) -> Iterator[Figure]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Figure:
        return next(one for one in self.entries if one.quantity.name == name)

    def __contains__(self, name: str) -> bool:
        return any(one.quantity.name == name for one in self.entries)

    def measured(self, found: Mapping[str, float | None]) -> Figures:
        """The same with what was measured, by name; what is not among them stays as it was."""
        return Figures(tuple(replace(one, measured=found.get(one.quantity.name, one.measured)) for one in self.entries))

    @property
    def predicted(self) -> dict[str, float | None]:
        return {one.quantity.name: one.predicted for one in self.entries}


def figures(quantities: Iterable[Quantity], predicted: Mapping[str, float | None], basis: str = "") -> Figures:
    """Predictions by name as figures."""
    return Figures(tuple(Figure(one, predicted.get(one.name), basis=basis) for one in quantities))
