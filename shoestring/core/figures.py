"""Figures: named numbers with a unit, predicted and measured, each with its basis.

Everything that shows figures (terminal, page, JSON, report) loops over them instead of listing them, so a figure that a
new room adds appears everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shoestring.core.units import unit_text


@dataclass(frozen=True)
class Quantity:
    """What a figure measures."""

    name: str  # its key in JSON, such as process_bytes
    label: str  # its name for people, such as process
    unit: str = "bytes"  # bytes, seconds, share, or the word for what is counted (operations, requests/s)
    counted: bool = False  # predicted exactly: a difference is shown as a number, not in percent
    optional: bool = False  # only shown where it is not zero

    def text(self, value: float | None) -> str:
        """A value of it, for people."""
        return "not known" if value is None else unit_text(value, self.unit)


@dataclass(frozen=True)
class Figure:
    quantity: Quantity
    predicted: float | None = None
    measured: float | None = None
    basis: str = ""  # how the prediction is known: measured on fake tensors, from a trial, a stated bound
    remark: str = ""  # why the measured value may be another than on a quiet machine

    @property
    def off(self) -> float | None:
        """(measured - predicted) / predicted; None if either is not known, or nothing was predicted. Terminal, page and
        JSON take it from here.

        >>> Figure(Quantity("process_bytes", "process"), predicted=100, measured=103).off
        0.03
        """
        if self.predicted is None or self.measured is None or (self.measured and not self.predicted):
            return None
        return round(self.measured / self.predicted - 1, 12) if self.predicted else 0.0

    @property
    def off_text(self) -> str:
        """The same as words: what was measured is ... what was predicted.

        >>> Figure(Quantity("peak_bytes", "tensors", counted=True), 20_480, 20_472).off_text
        '8 bytes below'
        >>> Figure(Quantity("step_seconds", "a step", "seconds"), 1.0, 1.25).off_text
        '25 % above'
        >>> Figure(Quantity("process_bytes", "process"), 1.0, 1.0).off_text
        'as predicted'
        """
        if self.off is None:
            return ""
        assert self.predicted is not None and self.measured is not None, "then there is no `off`"
        by = abs(int(self.measured - self.predicted))
        size = f"{100 * abs(self.off):.1f}" if abs(self.off) < 0.0995 else f"{100 * abs(self.off):,.0f}"
        way = "above" if self.off > 0 else "below"
        if self.quantity.counted and abs(self.off) < CLOSE:
            return f"{by:,} {self.quantity.unit} {way}" if by else AS
        return f"{size} % {way}" if float(size.replace(",", "")) else AS

    @property
    def shown(self) -> bool:
        return not self.quantity.optional or bool(self.predicted and self.measured)


AS = "as predicted"
CLOSE = 1e-3  # for a counted figure: a smaller relative difference is shown as a number


@dataclass(frozen=True)
class Figures:
    """Figures by name, in display order."""

    entries: tuple[Figure, ...] = ()

    def __iter__(self) -> Iterator[Figure]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Figure:
        return next(one for one in self.entries if one.quantity.name == name)

    def __contains__(self, name: str) -> bool:
        return any(one.quantity.name == name for one in self.entries)

    def with_measured(self, found: Mapping[str, float | None]) -> Figures:
        """The same with measured values by name; figures not among them stay as they were."""
        return Figures(tuple(replace(one, measured=found.get(one.quantity.name, one.measured)) for one in self.entries))

    def with_remark(self, name: str, remark: str) -> Figures:
        """The same with a remark on one figure, where it was measured."""
        return Figures(
            tuple(
                replace(one, remark=remark) if one.quantity.name == name and one.measured is not None else one
                for one in self.entries
            )
        )

    @property
    def remarks(self) -> list[str]:
        """Remarks on figures that are shown, each with the figure's label."""
        return [f"{one.quantity.label}: {one.remark}" for one in self.entries if one.remark and one.shown]

    @property
    def predictions(self) -> dict[str, float | None]:
        return {one.quantity.name: one.predicted for one in self.entries}


def figures(quantities: Iterable[Quantity], predicted: Mapping[str, float | None], basis: str = "") -> Figures:
    """Predictions by name, as figures."""
    return Figures(tuple(Figure(one, predicted.get(one.name), basis=basis) for one in quantities))
