"""What a person sees in the terminal: tables, bars and the progress line, as text.

Text is made for a screen. On a pipe it is plain and as wide as it gets, so that names stay whole and tools can read it; in a terminal it is
wrapped at words to the terminal's width, with colours where they are wanted. rich is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import localtime, strftime
from typing import TYPE_CHECKING, Any

from shoestring.core.exactness import stated_in
from shoestring.core.figures import Figures
from shoestring.core.units import about, bytes_text, seconds_text
from shoestring.planning.quantities import MEASURABLE
from shoestring.planning.spelling import plan_text as techniques_text
from shoestring.planning.spelling import technique_text

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Screen:
    """Where text is shown."""

    width: int | None = None  # columns; None: a pipe or a file, where no line is ever wrapped
    colour: bool = False


PIPE = Screen()
NARROW = 100  # columns below which a table of plans has no room for their names
WIDE = 100_000  # columns that no line reaches
DASHES = "    \n    \n -  \n    \n    \n    \n    \n    \n"  # rich's way of saying: a line of dashes below each column's heading


def rendered(parts: Iterable[RenderableType], screen: Screen) -> str:
    """What rich makes of these parts, one below the other."""
    from io import StringIO

    from rich.console import Console

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
    """Rows of cells as aligned columns; the first row is the heading, and row `bold` stands out. Figures, at the right, are never cut."""
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

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
    return rendered([table_part(rows, right)], screen)


def indented(text: str, by: int = 2) -> RenderableType:
    """A paragraph that stays indented where it is wrapped."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding.indent(Text(text, overflow="fold"), by)


def aligned(rows: Iterable[Sequence[str]], right: int) -> RenderableType:
    """Indented rows of cells, those of one column at the right; what is too long is wrapped in the last column."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

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


def plan_text(outcome: Mapping[str, Any], whys: Mapping[str, str], screen: Screen = PIPE) -> str:
    """The planner's outcome for a person."""
    chosen = outcome["chosen"]
    level = stated_in(chosen)
    stated = f", {level.word}" if level is not None else ""
    parts: list[RenderableType] = [
        plain(f"plan for {bytes_text(outcome['memory'])}{stated}: {techniques_text(chosen['techniques'])}")
    ]
    parts += [indented(f"{level.word}: {level.meaning}")] if level is not None else []
    parts += [""]
    parts += [indented(f"{technique_text(one)}: {whys.get(one['name'], '')}") for one in chosen["techniques"]]
    parts += [""] if chosen["techniques"] else []
    parts += [line for text in chosen.get("warnings", ()) for line in (plain(f"warning: {text}"), "")]
    parts += [*plans_part(plan_rows(outcome, stated), screen), "", *moved(chosen), *standing(chosen, screen)]
    parts += peak_part(chosen)
    if outcome["more_memory"]:
        parts += [
            "",
            plain("what more memory would buy, by the ledger:"),
            aligned(map(bought, outcome["more_memory"]), right=0),
        ]
    if outcome["refused"]:
        parts += [
            "",
            plain("not used:"),
            *(indented(f"{one['technique']}: {one['reason']}") for one in outcome["refused"]),
        ]
    tried = f"{outcome['tried']:,} combination{'s' * (outcome['tried'] != 1)} tried"
    parts += [
        "",
        plain(f"{tried}, {outcome['fitting']:,} fit by the ledger; planned in {seconds_text(outcome['seconds'])}"),
        plain(f"how sure: {chosen['sure']}"),
    ]
    parts += [plain(measured_earlier(outcome["measured_at"]))] if outcome.get("measured_at") else []
    return rendered(parts, screen)


def peak_part(chosen: Mapping[str, Any]) -> list[RenderableType]:
    """When the peak is and what it is made of; nothing where that is not known."""
    if not chosen["parts"]:
        return []
    whole = sum(chosen["parts"].values()) or 1
    rows = ((name, bytes_text(size), bar(size / whole)) for name, size in chosen["parts"].items() if size * 200 > whole)
    return [plain(f"the peak is in the {chosen['where']}:"), aligned(rows, right=1)]


def measured_earlier(when: float) -> str:
    """When the figures of a plan were measured, and what to do if that is too long ago."""
    return (
        f"measured earlier, at {strftime('%Y-%m-%d %H:%M', localtime(when))}, on this machine; files that the job reads may have "
        f"changed since, which nobody can know: --fresh-plan measures again"
    )


def bought(plan: Mapping[str, Any]) -> tuple[str, str]:
    """What the memory of a plan would buy."""
    return bytes_text(
        plan["process_bytes"]
    ), f"{seconds_text(plan['step_seconds'])} a step with {techniques_text(plan['techniques'])}"


def plain(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, overflow="fold")


def plan_rows(outcome: Mapping[str, Any], stated: str) -> list[list[str]]:
    """The chosen plan, plain training and the runners-up, by those figures that every plan has."""
    chosen, simplest = outcome["chosen"], outcome["plain"]
    always = [one for one in MEASURABLE if not one.optional]
    plans = [(chosen, f"chosen{stated}")]
    if chosen["techniques"] != simplest["techniques"]:
        plans += [(simplest, "the simplest plan" if simplest["techniques"] else "no technique")]
    plans += [(plan, plan["lost"]) for plan in outcome["runners_up"]]
    return [
        ["", *(one.label for one in always), ""],
        *(
            [techniques_text(plan["techniques"]), *(one.text(plan[one.name] or None) for one in always), why]
            for plan, why in plans
        ),
    ]


def plans_part(rows: Sequence[Sequence[str]], screen: Screen) -> list[RenderableType]:
    """Plans as a table; where that would cut names to pieces, as a name and a line of figures each."""
    figures_at = range(1, len(rows[0]) - 1)
    if screen.width is None or screen.width >= NARROW:
        return [table_part(rows, right=figures_at, bold=1)]
    return [
        part
        for name, *cells, why in rows[1:]
        for part in (
            plain(name),
            indented(
                ", ".join(f"{label} {cell}" for label, cell in zip(rows[0][1:-1], cells, strict=True)) + f": {why}"
            ),
        )
    ]


def moved(chosen: Mapping[str, Any]) -> list[RenderableType]:
    """What passes to and from the disk and between workers, if anything does."""
    disk = []
    if chosen["traffic_bytes"]:
        disk += [
            f"to and from the disk: {bytes_text(chosen['traffic_bytes'])} a step, at {bytes_text(chosen['disk_bytes_per_second'])}/s "
            f"as measured on this machine"
        ]
    if chosen["stored_bytes"]:
        disk += [f"on the disk of the run: {bytes_text(chosen['stored_bytes'])} of state"]
    sent = [f"{chosen['world']} workers train together; these are the figures of the largest. {sending(chosen)}"] * (
        chosen["world"] > 1
    )
    return [*map(plain, disk), *([""] if disk else []), *map(plain, sent), *([""] if sent else [])]


def standing(chosen: Mapping[str, Any], screen: Screen) -> list[RenderableType]:
    """How workers stand, and of a model that is cut where, and who does what when; nothing of one worker."""
    from shoestring.show.cut import cut_in, mesh_text
    from shoestring.show.timeline import cut_parts

    if not chosen.get("mesh"):
        return []
    mesh = plain(
        f"mesh: {mesh_text(chosen['mesh'])} ({', '.join(f'{axis} {size}' for axis, size in chosen['mesh'].items())})"
    )
    cut = cut_in(chosen)
    if cut is None:
        return [mesh, ""]
    return [mesh, *([indented(cut.why)] if cut.why else []), "", *cut_parts(cut, screen), ""]


def sending(plan: Mapping[str, Any]) -> str:
    """What workers send to each other.

    >>> sending({"sent_bytes": 2048.0, "sent_by_others_bytes": 0.0}), sending({"sent_bytes": 0.0})
    ('Each sends 2.00 KiB a step to the others', 'They send nothing: they share memory')
    """
    if plan.get("sent_by_others_bytes"):
        return (
            f"The first keeps the weights and sends {bytes_text(plan['sent_bytes'])} a step if all are as fast, less if some are late; "
            f"each of the others sends it {bytes_text(plan['sent_by_others_bytes'])} in each of its own steps"
        )
    return (
        f"Each sends {bytes_text(plan['sent_bytes'])} a step to the others"
        if plan["sent_bytes"]
        else ("They send nothing: they share memory")
    )


def beside(found: Figures, screen: Screen = PIPE) -> str:
    """Predicted beside measured, of any room's figures."""
    rows = [["", "predicted", "measured", "which is"]]
    rows += [
        [one.quantity.label, one.quantity.text(one.predicted), one.quantity.text(one.measured), one.off_text]
        for one in found
        if one.shown
    ]
    return table(rows, right=(1, 2, 3), screen=screen)


@dataclass(frozen=True)
class ProgressLine:
    """Where a training stands, for the line that moves meanwhile."""

    step: int
    steps: int  # in all; 0: nobody knows
    loss: float
    used: int  # bytes of the process at most so far
    budget: int | None = None  # bytes
    left: float | None = None  # seconds; None: not known
    epoch: int = 0  # the round of the data that it is in, from 1; 0: nobody counts them
    epochs: int = 0  # rounds in all; 0: it does not end by them
    rate: float | None = None  # learning rate; None: there is no schedule
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of the last validation


def progress(told: ProgressLine, screen: Screen = PIPE) -> str:
    """The line that moves while training: as much of it as fits, the most telling first.

    >>> progress(ProgressLine(5, 10, 2.5, 3 << 20, 6 << 20, 7.0))
    '██████████░░░░░░░░░░ 5/10  loss 2.500  memory 3.00 MiB of 6.00 MiB ████░░░░  about 7 s left'
    >>> progress(ProgressLine(17, 0, 2.5, 3 << 20, epoch=2, epochs=3, rate=1e-3, metrics={"loss": 2.6}), Screen(60))
    'step 17, epoch 2 of 3  loss 2.500  held out: loss 2.600'
    """
    room = (screen.width or WIDE) - 1
    lines = ("  ".join(parts) for parts in variants(told))
    return next((line for line in lines if len(line) <= room), f"{told.step}  {told.loss:.3f}"[:room])


def variants(told: ProgressLine) -> Iterator[list[str]]:
    """What the line may say, from all there is to the least."""
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

    def drawn(width: int, where: str) -> str:
        return where if done is None else f"{bar(done, width)} {where}"

    yield [drawn(20, place + epoch), loss, *rate, *tried, f"memory {memory}{filled}", *left]
    yield [drawn(8, place + epoch), loss, *rate, *tried, memory, *left]
    yield [drawn(8, place + epoch), loss, *tried, bytes_text(told.used), *left]
    yield [place + epoch, loss, *tried, bytes_text(told.used), *left]
    yield [place + epoch, loss, *tried, *left]
    yield [drawn(8, place + epoch), loss, bytes_text(told.used), *left]
    yield [place + epoch, loss, bytes_text(told.used), *left]
    yield [place + epoch, loss, *left]
    yield [place, loss, *left]
    yield [place, loss]


def number_text(value: float | None) -> str:
    """A loss or a metric, with as many digits as say something.

    >>> number_text(2.5), number_text(0.00012345), number_text(123456.7)
    ('2.500', '0.000123', '1.23e+05')
    """
    if value is None:
        return "not a number"
    return f"{value:.3f}" if 0.01 <= abs(value) < 10_000 or not value else f"{value:.3g}"
