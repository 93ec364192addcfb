"""Terminal output: tables, bars and the progress line, as text.

Text is made for a given screen. On a pipe it is plain and never wrapped, so that names stay whole and tools can read
it; in a terminal it is wrapped at words to the terminal's width, in colour if wanted. rich is only imported when
something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoestring.core.figures import Figures
from shoestring.core.units import about, bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Screen:
    """The properties of the output."""

    width: int | None = None  # None: a pipe or a file, where lines are never wrapped
    colour: bool = False


PIPE = Screen()
WIDE = 100_000  # wider than any line
DASHES = (
    "    \n    \n -  \n    \n    \n    \n    \n    \n"  # rich's notation for a line of dashes below each column heading
)


def render_text(parts: Iterable[RenderableType], screen: Screen) -> str:
    """Text that rich makes of these parts, one below the other."""
    from io import StringIO

    from shoestring.show.rich_parts import Console

    text = StringIO()
    console = Console(
        file=text,
        width=screen.width or WIDE,
        force_terminal=screen.colour,
        no_color=not screen.colour,
        color_system="standard" if screen.colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def table_part(rows: Sequence[Sequence[str]], right: Iterable[int] = (), bold: int | None = None) -> RenderableType:
    """Rows of cells in aligned columns; the first row is the heading, and row `bold` is highlighted. Right-aligned
    cells (figures) are never cut."""
    from shoestring.show.rich_parts import Box, Table, Text

    to_right = set(right)
    drawn = Table(
        box=Box(DASHES), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", border_style="dim"
    )
    for place, heading in enumerate(rows[0]):
        if place in to_right:
            drawn.add_column(
                Text(heading), justify="right", no_wrap=True, min_width=max(len(row[place]) for row in rows)
            )
        else:
            drawn.add_column(Text(heading), overflow="fold")
    for number, row in enumerate(rows[1:], start=1):
        drawn.add_row(*map(Text, row), style="bold" if number == bold else None)
    return drawn


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), screen: Screen = PIPE) -> str:
    """
    >>> print(table([["plan", "memory"], ["plain", "1 GiB"]], right=[1]))
    plan   memory
    ------ ------
    plain   1 GiB
    """
    return render_text([table_part(rows, right)], screen)


def indent_text(text: str, by: int = 2) -> RenderableType:
    """A paragraph that stays indented where it is wrapped."""
    from shoestring.show.rich_parts import Padding, Text

    return Padding.indent(Text(text, overflow="fold"), by)


def align_columns(rows: Iterable[Sequence[str]], right: int) -> RenderableType:
    """Indented rows of cells; the columns `right` are right-aligned, and long text is wrapped in the last column."""
    from shoestring.show.rich_parts import Padding, Table, Text

    found = list(rows)
    last = len(found[0]) - 1 if found else 0
    grid = Table.grid(padding=(0, 2, 0, 0))
    for place in range(last + 1):
        grid.add_column(justify="right" if place == right else "left", no_wrap=place < last, overflow="fold")
    for row in found:
        grid.add_row(*map(Text, row))
    return Padding.indent(grid, 2)


def bar(share: float, width: int = 24) -> str:
    """A horizontal bar.

    >>> bar(0.5, 4)
    '██░░'
    """
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def plain(text: str) -> RenderableType:
    from shoestring.show.rich_parts import Text

    return Text(text, overflow="fold")


def beside(found: Figures, screen: Screen = PIPE) -> str:
    """Predicted and measured figures as a table, with the remarks on them below."""
    rows = [["", "predicted", "measured", "which is"]]
    rows += [
        [one.quantity.label, one.quantity.text(one.predicted), one.quantity.text(one.measured), one.off_text]
        for one in found
        if one.shown
    ]
    return render_text([table_part(rows, right=(1, 2, 3)), *map(plain, found.remarks)], screen)


@dataclass(frozen=True)
class ProgressLine:
    """The data of the progress line of a training."""

    step: int
    steps: int  # total; 0: unknown
    loss: float
    used: int  # peak bytes of the process so far
    budget: int | None = None  # bytes
    left: float | None = None  # seconds; None: not known
    epoch: int = 0  # the present epoch, from 1; 0: not counted
    epochs: int = 0  # total; 0: the run does not end by epochs
    rate: float | None = None  # learning rate; None: no schedule
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of the last validation


def progress(told: ProgressLine, screen: Screen = PIPE) -> str:
    """The progress line while training: as much as fits, the most important first.

    >>> progress(ProgressLine(5, 10, 2.5, 3 << 20, 6 << 20, 7.0))
    '██████████░░░░░░░░░░ 5/10  loss 2.500  memory 3.00 MiB of 6.00 MiB ████░░░░  about 7 s left'
    >>> progress(ProgressLine(17, 0, 2.5, 3 << 20, epoch=2, epochs=3, rate=1e-3, metrics={"loss": 2.6}), Screen(60))
    'step 17, epoch 2 of 3  loss 2.500  held out: loss 2.600'
    """
    room = (screen.width or WIDE) - 1
    lines = ("  ".join(parts) for parts in variants(told))
    return next((line for line in lines if len(line) <= room), f"{told.step}  {told.loss:.3f}"[:room])


def variants(told: ProgressLine) -> Iterator[list[str]]:
    """The line's parts, from everything down to the least."""
    done = told.step / told.steps if told.steps else None
    epoch = f", epoch {told.epoch}" + (f" of {told.epochs}" if told.epochs else "") if told.epoch else ""
    place = f"{told.step}/{told.steps}" if told.steps else f"step {told.step}"
    loss, rate = f"loss {number_text(told.loss)}", [f"rate {told.rate:.2g}"] if told.rate is not None else []
    tried = (
        [f"held out: {', '.join(f'{name} {number_text(value)}' for name, value in told.metrics.items())}"]
        if told.metrics
        else []
    )
    left = [f"about {about(told.left)} left"] if told.left is not None else []
    memory = f"{bytes_text(told.used)} of {bytes_text(told.budget)}" if told.budget else bytes_text(told.used)
    filled = f" {bar(told.used / told.budget, 8)}" if told.budget else ""

    def with_bar(width: int, where: str) -> str:
        return where if done is None else f"{bar(done, width)} {where}"

    yield [with_bar(20, place + epoch), loss, *rate, *tried, f"memory {memory}{filled}", *left]
    yield [with_bar(8, place + epoch), loss, *rate, *tried, memory, *left]
    yield [with_bar(8, place + epoch), loss, *tried, bytes_text(told.used), *left]
    yield [place + epoch, loss, *tried, bytes_text(told.used), *left]
    yield [place + epoch, loss, *tried, *left]
    yield [with_bar(8, place + epoch), loss, bytes_text(told.used), *left]
    yield [place + epoch, loss, bytes_text(told.used), *left]
    yield [place + epoch, loss, *left]
    yield [place, loss, *left]
    yield [place, loss]


def number_text(value: float | None) -> str:
    """A loss or a metric with its significant digits.

    >>> number_text(2.5), number_text(0.00012345), number_text(123456.7)
    ('2.500', '0.000123', '1.23e+05')
    """
    if value is None:
        return "not a number"
    return f"{value:.3f}" if 0.01 <= abs(value) < 10_000 or not value else f"{value:.3g}"
