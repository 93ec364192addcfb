"""The page of a compressed model: what was asked for, what was predicted, what came out, and where each byte and each damage is.

report (what `shoestring compress --json` prints; anything may be missing)  ->  page, one HTML document without a script
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from shoestring.compression.amounts import (
    asked_share_text,
    asked_size_text,
    bare,
    fidelity_text,
    finite,
    share_text,
    size_text,
    time_text,
)
from shoestring.compression.frontier_section import frontier
from shoestring.compression.page_style import COMPRESSED
from shoestring.core.figures import Figure, Quantity
from shoestring.core.units import seconds_text
from shoestring.planning.spelling import technique_text
from shoestring.show.page.document import document
from shoestring.show.page.drawing import FRAME
from shoestring.show.page.render import NONE, renderer, said
from shoestring.show.page.telling import PlanRow
from shoestring.show.page.tiles import Tile
from shoestring.show.page.words import Entries, counted, dicts, inner, listed, loss_text

render = renderer("shoestring.compression")
MOST_LAYERS, MOST_ROWS, MOST_NOTES = 200, 12, 30  # what keeps the page small
HEADLINE = (("size_bytes",), ("fidelity", "mean"), ("latency_ms", "p50"))
FAR = 1e6
TIMES = " \N{MULTIPLICATION SIGN} "
MEDIAN, TAIL = "An answer, median", "An answer, 99 of 100"


def compression_page(report: Mapping[str, Any]) -> str:
    """The whole document.

    >>> compression_page({"size_bytes": {"measured": 15.8e6}}).splitlines()[0]
    '<!doctype html>'
    """
    name, missed = name_of(report), broken(report)
    plan = [
        PlanRow(technique_text(one), str(one.get("why") or "")) for one in dicts(report.get("techniques"))[:MOST_ROWS]
    ]
    content = render(
        "compression.html",
        name=name,
        state=state_of(report, missed),
        asked=list(asked_texts(report)),
        headline=headline(report),
        missed=missed,
        tiles=list(tiles(report)),
        rows=list(rows(report)),
        outputs=list(output_rows(report)),
        metrics=list(metrics(report)),
        metrics_more=len(inner(report, "metric")) - MOST_ROWS,
        measured_on=measured_on(report),
        frontier=frontier(report),
        frame=FRAME,
        plan=plan,
        told_plan=isinstance(report.get("techniques"), (list, tuple)),
        healed=healed(report),
        layers=layers(report),
        notes=[
            (kind, text) for key, kind in (("warnings", "Warning"), ("notes", "")) for text in listed(report.get(key))
        ][:MOST_NOTES],
        notes_more=len(listed(report.get("warnings"))) + len(listed(report.get("notes"))) - MOST_NOTES,
        facts=list(facts(report)),
    )
    title = Markup(" · ").join((said(headline(report), 120), name, "shoestring"))
    return document(title, content, script="", style=COMPRESSED)


# Reading


def result(report: Entries, *keys: str) -> float | None:
    """What was measured; where nothing was, what was predicted."""
    found = measured(report, *keys)
    return predicted(report, *keys) if found is None else found


def measured(report: Entries, *keys: str) -> float | None:
    return finite(at(report, *keys).get("measured"))


def predicted(report: Entries, *keys: str) -> float | None:
    return finite(at(report, *keys).get("predicted"))


def at(report: Entries, *keys: str) -> Entries:
    for key in keys:
        report = inner(report, key)
    return report


def asked_for(report: Entries, name: str) -> float | None:
    return finite(inner(report, "asked").get(name))


# The top


def name_of(report: Entries) -> Markup:
    folder = str(report.get("folder") or "").rstrip("/")
    return said(folder.rpartition("/")[2] or "compressed model", 80)


def state_of(report: Entries, missed: list[str]) -> tuple[str, str]:
    """Class and word of the pill; empty where nothing was measured."""
    if missed:
        return "warned", "Not what was asked for"
    return ("finished", "Compressed") if measured(report, "size_bytes") is not None else ("", "")


def headline(report: Entries) -> str:
    """
    >>> headline({"size_bytes": {"measured": 15.8e6}, "plain": {"size_bytes": 90.9e6}, "fidelity": {"mean": {"measured": 0.9984}},
    ...           "latency_ms": {"p50": {"measured": 12.0}}}).replace("\\xa0", " ")
    '15.8 MB of 90.9 MB, fidelity .9984, 12 ms an answer'
    """
    size, fidelity, latency = (result(report, *keys) for keys in HEADLINE)
    plain = finite(inner(report, "plain").get("size_bytes"))
    told = [size_text(size) + (f" of {size_text(plain)}" if plain is not None else "")] if size is not None else []
    told += [f"fidelity {fidelity_text(fidelity)}"] if fidelity is not None else []
    told += [f"{time_text(latency)} an answer"] if latency is not None else []
    before = "Predicted, not measured: " if told and all(measured(report, *keys) is None for keys in HEADLINE) else ""
    return before + ", ".join(told) or "Nothing is known of this compression"


def broken(report: Entries) -> list[str]:
    """What was asked for and does not hold of what was measured, in sentences."""
    if told := listed(report.get("missed")):
        return [str(one) for one in told[:MOST_ROWS]]
    size, fidelity = measured(report, "size_bytes"), measured(report, "fidelity", "mean")
    most, least, longest = (asked_for(report, name) for name in ("size", "quality", "latency"))
    share = asked_for(report, "percentile")
    answer = measured(report, "latency_ms", "p50" if share is not None and share <= 0.5 else "p99")
    found = []
    if size is not None and most is not None and size > most:
        found.append(
            f"It takes {size:,.0f} bytes, and {most:,.0f} were asked for."
            if size < 1e15
            else f"It takes {size_text(size)}, and {size_text(most)} were asked for."
        )
    if fidelity is not None and least is not None and fidelity < least:
        found.append(
            f"Fidelity, measured on unseen data, is {fidelity_text(fidelity)}, and {asked_share_text(least)} was asked for."
        )
    if answer is not None and longest is not None and answer > 1000 * longest:
        found.append(
            f"An answer took {time_text(answer)} when it was measured, and {time_text(1000 * longest)} was asked for."
        )
    return found


def asked_texts(report: Entries) -> Iterator[str]:
    """What was asked for, as flags: `size 16 MB`, `keep .998`."""
    texts = {
        "size": ("size", asked_size_text),
        "quality": ("keep", asked_share_text),
        "latency": ("latency", lambda one: time_text(1000 * one)),
    }
    for key, value in list(inner(report, "asked").items())[:MOST_ROWS]:
        name, text = texts.get(key, (str(key), asked_share_text))
        known = finite(value)
        if known is not None and key != "percentile":
            yield f"{name} {text(known)}"
        elif isinstance(value, str):
            yield f"{name} {value}"


def tiles(report: Entries) -> Iterator[Tile]:
    """The figures one looks at first, big."""
    size, plain = result(report, "size_bytes"), inner(report, "plain")
    most, least, longest = (asked_for(report, name) for name in ("size", "quality", "latency"))
    if size is not None:
        smaller = times(finite(plain.get("size_bytes")), size, "smaller", "larger")
        yield Tile("Size", size_text(size), smaller, most is not None and size > most)
    mean, worst = result(report, "fidelity", "mean"), result(report, "fidelity", "worst")
    if mean is not None:
        note = f"worst {fidelity_text(worst)}" if worst is not None else ""
        yield Tile("Fidelity", fidelity_text(mean), note, least is not None and mean < least)
    for key, name in (("p50", MEDIAN), ("p99", TAIL)):
        found = result(report, "latency_ms", key)
        if found is not None:
            over = key == "p99" and longest is not None and found > 1000 * longest
            yield Tile(
                name,
                time_text(found),
                times(finite(inner(plain, "latency_ms").get(key)), found, "faster", "slower"),
                over,
            )
    memory = result(report, "memory_bytes")
    if memory is not None:
        yield Tile(
            "Weights in memory", size_text(memory), times(finite(plain.get("memory_bytes")), memory, "less", "more")
        )
    for row in list(metrics(report))[:1]:
        yield Tile(row.name[:30].capitalize(), row.compressed, f"original {row.original}")


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
    """All as text, with a dash for what is not known."""

    name: str
    predicted: str
    measured: str
    change: str
    original: str


def rows(report: Entries) -> Iterator[FigureRow]:
    """Figures predicted and measured, with the original's. A fidelity is as far off as its damage is."""
    plain = inner(report, "plain")
    figures = (
        (("size_bytes",), Quantity("size_bytes", "Size on disk", counted=True), size_text, plain.get("size_bytes")),
        (
            ("memory_bytes",),
            Quantity("memory_bytes", "Weights in memory", counted=True),
            size_text,
            plain.get("memory_bytes"),
        ),
        (("latency_ms", "p50"), Quantity("p50", MEDIAN, "ms"), time_text, inner(plain, "latency_ms").get("p50")),
        (("latency_ms", "p99"), Quantity("p99", TAIL, "ms"), time_text, inner(plain, "latency_ms").get("p99")),
        (("fidelity", "mean"), Quantity("mean", "Fidelity, mean", "share"), fidelity_text, 1.0),
        (("fidelity", "worst"), Quantity("worst", "Fidelity, worst", "share"), fidelity_text, 1.0),
    )
    for keys, quantity, text, original in figures:
        first, second = predicted(report, *keys), measured(report, *keys)
        if first is None and second is None:
            continue
        yield FigureRow(
            quantity.label, text(first), text(second), change(quantity, first, second), text(finite(original))
        )


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
    """As everywhere, but a factor of a million is not written out in percent."""
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
    error: str  # interval of 95 %, or a standard error
    count: str  # with what is counted


def metrics(report: Entries) -> Iterator[MetricRow]:
    """The job's own metrics."""
    for name, told in list(inner(report, "metric").items())[:MOST_ROWS]:
        if not isinstance(told, Mapping):
            continue
        original, value, error, count = (
            finite(told.get(key)) for key in ("original", "measured", "standard_error", "n")
        )
        before, after = (NONE if one is None else bare(loss_text(one)) for one in (original, value))
        yield MetricRow(str(name), before, after, interval_text(told, error), counted_text(count, told.get("of")))


def counted_text(count: float | None, unit: object) -> str:
    return f"{whole_text(count)} {unit}" if isinstance(unit, str) and count is not None else whole_text(count)


def interval_text(told: Entries, error: float | None) -> str:
    """
    >>> interval_text({"interval": [0.91, 0.95]}, 0.01), interval_text({}, 0.01), interval_text({}, None)
    ('.91 to .95', '\xb1 .01', '')
    """
    low, high = (*(finite(one) for one in listed(told.get("interval"))[:2]), None, None)[:2]
    if low is not None and high is not None:
        return f"{bare(f'{low:.3g}')} to {bare(f'{high:.3g}')}"
    return "" if error is None else f"\N{PLUS-MINUS SIGN} {bare(f'{error:.2g}')}"


def whole_text(count: float | None) -> str:
    return NONE if count is None else f"{count:,.0f}" if abs(count) < 1e9 else f"{count:.3g}"


def measured_on(report: Entries) -> str:
    told = inner(report, "fidelity")
    count, by = finite(told.get("n")), told.get("by")
    how = MEASURES.get(str(by), "")
    on = (
        f"on {counted(int(count), 'answer')} that nothing was chosen by"
        if count is not None and 0 <= count < 1e15
        else ""
    )
    return (f"Fidelity is {how}" if how else "Fidelity was measured" if on else "") + (
        f", {on}" if how and on else f" {on}" if on else ""
    )


MEASURES = {
    "cosine": "the cosine of answers to the original's",
    "kl": "exp(-KL) of answers to the original's",
    "binary": "exp(-KL) of every yes or no to the original's",
    "r2": "R\N{SUPERSCRIPT TWO} of answers to the original's",
}


@dataclass(frozen=True)
class OutputRow:
    """An output of the model: all as text."""

    name: str
    by: str
    mean: str
    worst: str
    count: str
    leads: bool


def output_rows(report: Entries) -> Iterator[OutputRow]:
    """How close every output is, and why it is compared so."""
    told = inner(report, "fidelity")
    for one in dicts(told.get("outputs"))[:MOST_ROWS]:
        name, *how = (value if isinstance(value, str) else "" for value in map(one.get, ("name", "by", "why")))
        yield OutputRow(
            name or NONE,
            "; ".join(filter(None, how)) or NONE,
            fidelity_text(measured(one, "mean")),
            fidelity_text(measured(one, "worst")),
            f"{whole_text(finite(one.get('samples')))} samples",
            bool(name) and name == told.get("output"),
        )


# What it is made of


@dataclass(frozen=True)
class LayerRow:
    name: str
    shape: str
    technique: str
    bits: str
    size: str
    damage: str
    bars: tuple[str, str]  # widths of those of size and damage, in percent


@dataclass(frozen=True)
class LayerTable:
    note: str
    rows: tuple[LayerRow, ...]
    more: str


def layers(report: Entries) -> LayerTable | None:
    """Weights by damage, the greatest first; of equal ones the largest."""
    found = [(finite(one.get("damage")), finite(one.get("bytes")), one) for one in dicts(report.get("layers"))]
    if not found:
        return None
    found.sort(key=lambda one: (one[0] is None, -(one[0] or 0.0), -(one[1] or 0.0)))
    worst, largest = max(damage or 0.0 for damage, _, _ in found), max(size or 0.0 for _, size, _ in found)
    shown = tuple(
        layer(one, size, damage, (bar(size, largest), bar(damage, worst))) for damage, size, one in found[:MOST_LAYERS]
    )
    rest = found[MOST_LAYERS:]
    sums = sum(size or 0.0 for _, size, _ in rest), sum(damage or 0.0 for damage, _, _ in rest)
    more = f"and {len(rest):,} more with {size_text(sums[0])} and damage {share_text(sums[1])} in all: see layers in report.json"
    by = (
        "size: what single weights damage is not known after healing"
        if all(damage is None for damage, _, _ in found)
        else "the damage that the choice reckoned with: of storing this one so"
    )
    note = f"{counted(len(found), 'weight')}, by {by}. Bars are shares of the greatest."
    return LayerTable(note, shown, more if rest else "")


def layer(one: Entries, size: float | None, damage: float | None, bars: tuple[str, str]) -> LayerRow:
    bits, technique = finite(one.get("bits")), str(one.get("technique") or "")
    form = str(one.get("form") or "")
    how = " ".join(word for word in (technique, form if form != "plain" else "") if word) or (
        "as it is" if form == "plain" else NONE
    )
    sides = [finite(side) for side in listed(one.get("shape"))[:6]]
    shape = TIMES.join(whole_text(side).replace(",", "") for side in sides) or NONE
    told = NONE if bits is None else f"{bits:.3g}"
    return LayerRow(str(one.get("name") or NONE), shape, how, told, size_text(size), share_text(damage), bars)


def bar(value: float | None, most: float) -> str:
    """
    >>> bar(1.0, 4.0), bar(1e-9, 4.0), bar(None, 4.0), bar(0.0, 0.0)
    ('25.0', '0.5', '', '')
    """
    return f"{max(0.5, min(100.0, 100 * (value / most))):.1f}" if value is not None and value > 0 and most > 0 else ""


def healed(report: Entries) -> str:
    """
    >>> healed({"healed": {"seconds": 598, "before": 0.962, "after": 0.9751}})
    'The small model learned from the original for 9 min 58 s: fidelity .9620 before, .9751 after.'
    """
    told = inner(report, "healed")
    seconds, steps = finite(told.get("seconds")), finite(told.get("steps"))
    before, after = (
        finite(told.get(key)) if not isinstance(told.get(key), Mapping) else finite(inner(told, key).get("mean"))
        for key in ("before", "after")
    )
    if seconds is None and before is None and after is None:
        return ""
    long = f" for {seconds_text(seconds)}" if seconds is not None and 0 <= seconds < 1e9 else ""
    long += f", {counted(int(steps), 'step')}" if steps is not None and 0 <= steps < 1e15 else ""
    told_of = [
        f"{fidelity_text(value)} {word}" for value, word in ((before, "before"), (after, "after")) if value is not None
    ]
    return f"The small model learned from the original{long}" + (
        f": fidelity {', '.join(told_of)}." if told_of else "."
    )


def facts(report: Entries) -> Iterator[tuple[str, str]]:
    if folder := report.get("folder"):
        yield "Folder", str(folder)
    if files := ", ".join(map(str, listed(report.get("files"))[:MOST_ROWS])):
        yield "Files", files
    if path := inner(report, "onnx").get("file", inner(report, "onnx").get("path")):
        yield "ONNX", str(path)
    yield "Sizes", "MB are millions of bytes"
