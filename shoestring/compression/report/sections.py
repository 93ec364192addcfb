"""The page of a compressed model: requested, predicted and measured values, and the bytes and damage of each weight.

CompressReport -> page, one HTML document without a script
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from shoestring.compression.report.amounts import (
    asked_share_text,
    asked_size_text,
    bare,
    fidelity_text,
    share_text,
    size_text,
    time_text,
)
from shoestring.compression.report.compress_report import Amount, CompressReport, LayerReport, MetricReport
from shoestring.compression.report.frontier_section import frontier
from shoestring.compression.report.page_style import STYLE_OF_COMPRESSION
from shoestring.core.figures import Figure, Quantity
from shoestring.core.units import seconds_text
from shoestring.show.page.document import document
from shoestring.show.page.drawings.drawing import FRAME
from shoestring.show.page.render import NONE, escape_cut, renderer
from shoestring.show.page.sections.telling import plan_rows
from shoestring.show.page.sections.tiles import Tile
from shoestring.show.page.style import STYLE
from shoestring.show.page.words import count_text, loss_text

render = renderer("shoestring.compression")
MOST_LAYERS, MOST_ROWS, MOST_NOTES = 200, 12, 30  # limits that keep the page small
FAR = 1e6
TIMES = " \N{MULTIPLICATION SIGN} "
MEDIAN, TAIL = "An answer, median", "An answer, 99 of 100"


def compression_page(report: CompressReport) -> str:
    """The whole document.

    >>> compression_page(CompressReport(size_bytes=Amount(measured=15.8e6))).splitlines()[0]
    '<!doctype html>'
    """
    title = Markup(" · ").join((escape_cut(headline(report), 120), name_of(report), "shoestring"))
    return document(title, compression_content(report), script="", style=STYLE + STYLE_OF_COMPRESSION)


def compression_content(report: CompressReport) -> Markup:
    """What stands inside <main>."""
    return render(
        "compression.html",
        name=name_of(report),
        state=state_of(report),
        asked=list(asked_texts(report)),
        headline=headline(report),
        missed=report.missed[:MOST_ROWS],
        tiles=list(tiles(report)),
        rows=list(rows(report)),
        outputs=list(output_rows(report)),
        metrics=list(metrics(report)),
        metrics_more=len(report.metric) - MOST_ROWS,
        measured_on=fidelity_note(report),
        frontier=frontier(report),
        frame=FRAME,
        plan=plan_rows((report.techniques or ())[:MOST_ROWS]),
        told_plan=report.techniques is not None,
        healed=healing_text(report),
        layers=layers(report),
        notes=report.notes[:MOST_NOTES],
        notes_more=len(report.notes) - MOST_NOTES,
        facts=list(facts(report)),
    )


# The top


def name_of(report: CompressReport) -> Markup:
    return escape_cut(report.folder.rstrip("/").rpartition("/")[2] or "compressed model", 80)


def state_of(report: CompressReport) -> tuple[str, str]:
    """CSS class and word of the state; empty if nothing was measured."""
    if report.missed:
        return "warned", "Not what was asked for"
    return ("finished", "Compressed") if report.size_bytes.measured is not None else ("", "")


def headline(report: CompressReport) -> str:
    """
    >>> headline(CompressReport(size_bytes=Amount(measured=15.8e6))).replace("\\xa0", " ")
    '15.8 MB'
    """
    size, fidelity, latency = told = report.size_bytes, report.fidelity.mean, report.latency_ms.p50
    plain, words = report.plain.size_bytes, list[str]()
    if size.best_known is not None:
        words += [size_text(size.best_known) + (f" of {size_text(plain)}" if plain is not None else "")]
    words += [f"fidelity {fidelity_text(fidelity.best_known)}"] if fidelity.best_known is not None else []
    words += [f"{time_text(latency.best_known)} an answer"] if latency.best_known is not None else []
    before = "Predicted, not measured: " if words and all(one.measured is None for one in told) else ""
    return before + ", ".join(words) or "Nothing is known of this compression"


def asked_texts(report: CompressReport) -> Iterator[str]:
    """Requested limits as text: `size 16 MB`, `keep .998`."""
    texts = {
        "size": ("size", asked_size_text),
        "quality": ("keep", asked_share_text),
        "latency": ("latency", lambda one: time_text(1000 * one)),
    }
    for key, value in list(report.asked.items())[:MOST_ROWS]:
        name, text = texts.get(key, (key, asked_share_text))
        yield f"{name} {value if isinstance(value, str) else text(value)}"


def tiles(report: CompressReport) -> Iterator[Tile]:
    """The most important figures."""
    plain, size, memory = report.plain, report.size_bytes.best_known, report.memory_bytes.best_known
    if size is not None:
        yield Tile(
            "Size", size_text(size), times(plain.size_bytes, size, "smaller", "larger"), above(size, report, "size")
        )
    mean, worst = report.fidelity.mean.best_known, report.fidelity.worst.best_known
    if mean is not None:
        note = f"worst {fidelity_text(worst)}" if worst is not None else ""
        least = report.asked.get("quality")
        yield Tile("Fidelity", fidelity_text(mean), note, isinstance(least, float) and mean < least)
    for name, one, original, over in (
        (MEDIAN, report.latency_ms.p50.best_known, plain.latency_ms.p50, False),
        (
            TAIL,
            tail := report.latency_ms.p99.best_known,
            plain.latency_ms.p99,
            above((tail or 0.0) / 1000, report, "latency"),
        ),
    ):
        if one is not None:
            yield Tile(name, time_text(one), times(original, one, "faster", "slower"), over)
    if memory is not None:
        yield Tile("Weights in memory", size_text(memory), times(plain.memory_bytes, memory, "less", "more"))
    for row in list(metrics(report))[:1]:
        yield Tile(row.name[:30].capitalize(), row.compressed, f"original {row.original}")


def above(value: float, report: CompressReport, limit: str) -> bool:
    """Whether it exceeds the requested limit."""
    most = report.asked.get(limit)
    return isinstance(most, float) and value > most


def times(before: float | None, now: float, less: str, more: str) -> str:
    """
    >>> times(90.0, 15.0, "smaller", "larger"), times(1.0, 2.0, "faster", "slower"), times(None, 2.0, "less", "more")
    ('6.0x smaller', '2.0x slower', '')
    """
    if before is None or before <= 0 or now <= 0:
        return ""
    factor, word = (before / now, less) if before >= now else (now / before, more)
    return f"{factor:.1f}x {word}" if factor < 1e6 else ""


# Predicted and measured


@dataclass(frozen=True)
class FigureRow:
    """A row of text cells, with a dash for unknown values."""

    name: str
    predicted: str
    measured: str
    change: str
    original: str


def rows(report: CompressReport) -> Iterator[FigureRow]:
    """Predicted and measured figures, and the original's. For a fidelity, the difference is that of its damage."""
    plain, latency, fidelity = report.plain, report.latency_ms, report.fidelity
    size, memory = (
        Quantity("size_bytes", "Size on disk", counted=True),
        Quantity("memory_bytes", "Weights in memory", counted=True),
    )
    figures = (
        (report.size_bytes, size, size_text, plain.size_bytes),
        (report.memory_bytes, memory, size_text, plain.memory_bytes),
        (latency.p50, Quantity("p50", MEDIAN, "ms"), time_text, plain.latency_ms.p50),
        (latency.p99, Quantity("p99", TAIL, "ms"), time_text, plain.latency_ms.p99),
        (fidelity.mean, Quantity("mean", "Fidelity, mean", "share"), fidelity_text, 1.0),
        (fidelity.worst, Quantity("worst", "Fidelity, worst", "share"), fidelity_text, 1.0),
    )
    for one, quantity, text, original in figures:
        if one != Amount():
            off = change(quantity, one.predicted, one.measured)
            yield FigureRow(quantity.label, text(one.predicted), text(one.measured), off, text(original))


def change(quantity: Quantity, first: float | None, second: float | None) -> str:
    """
    >>> change(Quantity("mean", "Fidelity", "share"), 0.9984, 0.9982), change(Quantity("size_bytes", "Size", counted=True), 1000, 1000)
    ('damage 12 % above', 'as predicted')
    """
    if first is None or second is None:
        return NONE
    if quantity.unit != "share":
        return off_text(quantity, first, second)
    told = off_text(quantity, max(0.0, 1 - first), max(0.0, 1 - second))
    return f"damage {told}" if "%" in told else told


def off_text(quantity: Quantity, first: float, second: float) -> str:
    """As everywhere, except that a factor of a million is not written in percent."""
    if second > FAR * abs(first) or max(abs(first), abs(second)) >= 1e15:
        return (
            NONE if not first else "far above" if second > first else "far below" if second < first else "as predicted"
        )
    return Figure(quantity, first, second).off_text or NONE


@dataclass(frozen=True)
class MetricRow:
    name: str
    original: str
    compressed: str
    error: str  # 95 % confidence interval, or a standard error
    count: str  # number with what is counted


def metrics(report: CompressReport) -> Iterator[MetricRow]:
    """The job's own metrics."""
    for name, told in list(report.metric.items())[:MOST_ROWS]:
        before, after = (NONE if one is None else bare(loss_text(one)) for one in (told.original, told.measured))
        count = f"{whole_text(told.n)} {told.of}" if told.n is not None else NONE
        yield MetricRow(name, before, after, interval_text(told), count.strip())


def interval_text(told: MetricReport) -> str:
    """
    >>> interval_text(MetricReport(interval=(0.91, 0.95))), interval_text(MetricReport(standard_error=0.01)), interval_text(MetricReport())
    ('.91 to .95', '\xb1 .01', '')
    """
    if told.interval is not None:
        low, high = told.interval
        return f"{bare(f'{low:.3g}')} to {bare(f'{high:.3g}')}"
    return "" if told.standard_error is None else f"\N{PLUS-MINUS SIGN} {bare(f'{told.standard_error:.2g}')}"


def whole_text(count: float | None) -> str:
    return NONE if count is None else f"{count:,.0f}" if abs(count) < 1e9 else f"{count:.3g}"


def fidelity_note(report: CompressReport) -> str:
    count, how = report.fidelity.n, MEASURES.get(report.fidelity.by, "")
    on = f"on {count_text(count, 'answer')} that nothing was chosen by" if count is not None else ""
    if not how:
        return f"Fidelity was measured {on}" if on else ""
    return f"Fidelity is {how}" + (f", {on}" if on else "")


MEASURES = {
    "cosine": "the cosine of answers to the original's",
    "kl": "exp(-KL) of answers to the original's",
    "binary": "exp(-KL) of every yes or no to the original's",
    "r2": "R\N{SUPERSCRIPT TWO} of answers to the original's",
}


@dataclass(frozen=True)
class OutputRow:
    """An output of the model, as text cells."""

    name: str
    by: str
    mean: str
    worst: str
    count: str
    leads: bool


def output_rows(report: CompressReport) -> Iterator[OutputRow]:
    """The fidelity of every output, and the reason for its measure."""
    for one in report.fidelity.outputs[:MOST_ROWS]:
        yield OutputRow(
            one.name or NONE,
            "; ".join(filter(None, (one.by, one.why))) or NONE,
            fidelity_text(one.mean.measured),
            fidelity_text(one.worst.measured),
            f"{whole_text(one.samples)} samples",
            bool(one.name) and one.name == report.fidelity.output,
        )


# Weights


@dataclass(frozen=True)
class LayerRow:
    name: str
    shape: str
    technique: str
    bits: str
    size: str
    damage: str
    bars: tuple[str, str]  # widths of the bars for size and damage, in percent


@dataclass(frozen=True)
class LayerTable:
    note: str
    rows: tuple[LayerRow, ...]
    more: str


def layers(report: CompressReport) -> LayerTable | None:
    """Weights by damage, largest first; ties by size."""
    if not report.layers:
        return None
    found = sorted(report.layers, key=lambda one: (one.damage is None, -(one.damage or 0.0), -(one.bytes or 0)))
    worst, largest = max(one.damage or 0.0 for one in found), max(one.bytes or 0 for one in found)
    shown, rest = tuple(layer(one, worst, largest) for one in found[:MOST_LAYERS]), found[MOST_LAYERS:]
    sums = size_text(sum(one.bytes or 0 for one in rest)), share_text(sum(one.damage or 0.0 for one in rest))
    more = f"and {len(rest):,} more with {sums[0]} and damage {sums[1]} in all: see layers in report.json"
    by = (
        "size: what single weights damage is not known after healing"
        if all(one.damage is None for one in found)
        else "the damage that the choice reckoned with: of storing this one so"
    )
    note = f"{count_text(len(found), 'weight')}, by {by}. Bars are shares of the greatest."
    return LayerTable(note, shown, more if rest else "")


def layer(one: LayerReport, worst: float, largest: float) -> LayerRow:
    how = " ".join(filter(None, (one.technique, one.form if one.form != "plain" else "")))
    return LayerRow(
        one.name or NONE,
        TIMES.join(map(str, one.shape[:6])) or NONE,
        how or ("as it is" if one.form == "plain" else NONE),
        NONE if one.bits is None else f"{one.bits:.3g}",
        size_text(one.bytes),
        share_text(one.damage),
        (bar(one.bytes, largest), bar(one.damage, worst)),
    )


def bar(value: float | None, most: float) -> str:
    """
    >>> bar(1.0, 4.0), bar(1e-9, 4.0), bar(None, 4.0), bar(0.0, 0.0)
    ('25.0', '0.5', '', '')
    """
    return f"{max(0.5, min(100.0, 100 * (value / most))):.1f}" if value is not None and value > 0 and most > 0 else ""


def healing_text(report: CompressReport) -> str:
    """The effect of healing, in a sentence."""
    told = report.healed
    if told is None:
        return ""
    long = f"{seconds_text(told.seconds)}, {count_text(told.steps, 'step')}"
    before, after = fidelity_text(told.before), fidelity_text(told.after)
    return f"The small model learned from the original for {long}: fidelity {before} before, {after} after."


def facts(report: CompressReport) -> Iterator[tuple[str, str]]:
    if report.folder:
        yield "Folder", report.folder
    if files := ", ".join(report.files[:MOST_ROWS]):
        yield "Files", files
    if report.onnx is not None:
        yield "ONNX", report.onnx.path
    yield "Sizes", "MB are millions of bytes"
