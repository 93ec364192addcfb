"""The report of a training run as one web page: no script, no other file, nothing fetched.

    report (a dict, any key may be missing)  ->  sections, each empty if its figures are  ->  one HTML document

Drawings are SVG in a box 440 wide, so that their words stay readable on a phone and on half a desktop window.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, isfinite, log, log10
from statistics import fmean
from typing import Any

from shoestring.core.units import bytes_text, seconds_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 240, 64, 428, 30, 204   # the drawing, and the plot inside it
MOST_POINTS, MOST_BARS, MOST_ROWS, MOST_TEXT = 240, 120, 12, 8000      # what keeps the page small
PHASES = ("forward", "backward", "update")
PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "inputs", "buffers")
NONE = "\N{EN DASH}"   # in place of a figure that is missing
Point = tuple[float, float]

STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfb;--ink:#1b1f24;--soft:#5d6670;--line:#e3e5e8;--well:#f2f3f4;--alert:#b3261e;
--forward:#3f74c4;--backward:#d0793a;--update:#3d9270;--parameters:#3f74c4;--optimizer:#8b6fc0;--gradients:#d0793a;
--activations:#3d9270;--temporaries:#c9a227;--inputs:#b8587f;--buffers:#5796ad;--other:#8d959e}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e8eaed;--soft:#9ea7b1;--line:#2c3138;--well:#1d2126;
--alert:#ff8a80;--forward:#6f9fe6;--backward:#e59a62;--update:#62b894;--parameters:#6f9fe6;--optimizer:#ab93dc;
--gradients:#e59a62;--activations:#62b894;--temporaries:#dcbb52;--inputs:#d880a4;--buffers:#7db7cc;--other:#8d959e}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere;-webkit-text-size-adjust:100%}
main{max-width:66rem;margin:auto;padding:2.5rem 1rem 3rem;display:grid;grid-template-columns:minmax(0,1fr);gap:2.75rem 3.5rem}
@media(min-width:54rem){main{grid-template-columns:repeat(2,minmax(0,1fr));padding:4rem 2.5rem}.wide{grid-column:1/-1}}
h1,h2,p,ul,figure,dl,dd,pre{margin:0;padding:0}
h1{font-size:1rem;font-weight:600;display:flex;flex-wrap:wrap;gap:.35rem .5rem;align-items:baseline}
h1 span{font-weight:400;font-size:.875rem;color:var(--soft)}
h2{font-size:1.0625rem;font-weight:650;line-height:1.3;margin-bottom:.25rem}
.verdict{font-size:clamp(1.5rem,1.1rem + 2vw,2.375rem);font-weight:650;line-height:1.2;letter-spacing:-.018em;
margin:.75rem 0 1.75rem;max-width:24em;text-wrap:balance;overflow-wrap:break-word}
.note{color:var(--soft);font-size:.875rem;max-width:40rem;margin-bottom:.75rem}
svg{display:block;width:100%;height:auto}
figure svg{max-width:38rem}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
@media(max-width:30rem){svg text{font-size:13.5px}}
svg .grid{stroke:var(--line)}
svg .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .limit{stroke:var(--alert);stroke-width:1.5;stroke-dasharray:5 4}
svg .limit-text{fill:var(--alert)}
svg .value{fill:var(--ink);font-weight:600}
.gauge{display:grid;gap:.875rem}
.gauge div p{display:flex;justify-content:space-between;font-size:.9375rem;gap:1rem;margin-bottom:.25rem}
.gauge b,td,.parts span{font-variant-numeric:tabular-nums}
.gauge svg,.stack svg{height:.75rem;border-radius:3px;background:var(--well)}
.stack svg{height:2.25rem;max-width:none}
.gap,.mark{vector-effect:non-scaling-stroke;stroke:var(--paper);stroke-width:7px}
.mark{stroke:var(--alert);stroke-width:2.5px}
.gauge .note{margin:0}
.gauge .note::before{content:"";display:inline-block;width:2px;height:.9em;background:var(--alert);margin-right:.5rem;
vertical-align:-.1em}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
th,td{text-align:right;padding:.5rem 0 .5rem .5rem;border-bottom:1px solid var(--line);font-weight:400;white-space:nowrap}
th:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);font-size:.8125rem}
tbody td:nth-child(3){font-weight:650}
tr.budget td{font-weight:400;white-space:normal}
.over{color:var(--alert)}
@media(max-width:30rem){table{font-size:.8125rem}thead th{font-size:.75rem}}
ul{list-style:none}
h2+pre{margin-top:.75rem}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.875rem;color:var(--soft);margin-top:.5rem}
i{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.5rem}
.parts{margin-top:.75rem;font-size:.9375rem}
.parts li{display:grid;grid-template-columns:1fr auto 3.5rem;gap:.75rem;padding:.3rem 0;border-bottom:1px solid var(--line)}
.parts span{text-align:right}
.parts span:last-child{color:var(--soft)}
.rows li{padding:.625rem 0;border-bottom:1px solid var(--line)}
.rows li p{color:var(--soft);font-size:.9375rem}
.rows li p b{color:var(--ink);font-weight:500;font-variant-numeric:tabular-nums}
code,pre,.hash{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.875rem}
code{font-weight:600}
pre{background:var(--well);border-radius:6px;padding:1rem;white-space:pre-wrap;max-height:28rem;overflow:auto;line-height:1.5}
footer{border-top:1px solid var(--line);padding-top:1.25rem;font-size:.875rem;color:var(--soft)}
footer dl{display:grid;grid-template-columns:minmax(5rem,auto) 1fr;gap:.35rem 1.25rem}
footer dd{color:var(--ink)}
"""


def page(report: dict[str, Any]) -> str:
    """The whole document.

    >>> page({"job": "gpt"}).splitlines()[0]
    '<!doctype html>'
    """
    halves = [body for body in (blocks(report), parts(report), losses(report), process(report), plan(report),
                                runners_up(report)) if body]
    alone = len(halves) - 1 if len(halves) % 2 else len(halves)   # the one without a neighbour takes both columns
    sections = [wide(comparison(report)), *(half if place != alone else wide(half) for place, half in enumerate(halves)),
                wide(shown(report))]
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width,initial-scale=1">\n'
            f"<title>{job_text(report)} · shoestring report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"{top(report)}\n{lines(sections)}{footer(report)}\n</main>\n</body>\n</html>\n")


# Reading the report


def inner(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The dict below `key`, empty if there is none."""
    found = report.get(key)
    return found if isinstance(found, Mapping) else {}


def number(value: object) -> float | None:
    """The value if one can calculate with it.

    >>> number(3), number(float("nan")), number(None), number(True)
    (3, None, None, None)
    """
    return value if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) else None


def figure_of(report: Mapping[str, Any], key: str, name: str) -> float | None:
    return number(inner(report, key).get(name))


def pairs(found: object) -> list[tuple[Any, float]]:
    """The [anything, number] entries of a list."""
    entries = found if isinstance(found, list | tuple) else ()
    return [(first, second) for first, second in entries if number(second) is not None]


def steps_done(report: Mapping[str, Any]) -> int:
    return int(number(report.get("steps")) or len(report.get("losses") or ()))


# Words


def job_text(report: Mapping[str, Any]) -> str:
    return escape(str(report.get("job") or "training run"))


def lines(found: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in found if line)


def wide(section: str) -> str:
    return section.replace("<section>", '<section class="wide">', 1)


def section(title: str, note: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n" + (f'<p class="note">{glued(note)}</p>\n' if note else "") + f"{body}\n</section>"


def glued(text: str) -> str:
    """Text in which a number and its unit stay on one line.

    >>> glued("at most 531 MiB, 2 layers")
    'at most 531&nbsp;MiB, 2 layers'
    """
    return re.sub(r"(?<=\d) (?=(?:[KMG]i)?B\b|m?s\b|%)", "&nbsp;", text)


def tidy(text: str) -> str:
    """A tick's text without zeros that say nothing.

    >>> tidy("50.0 MiB"), tidy("5 min 0 s"), tidy("10 s"), tidy("0 B")
    ('50 MiB', '5 min', '10 s', '0')
    """
    return re.sub(r"^0 \w+$", "0", re.sub(r"\.0+(?= )|(?<=\w) 0 (s|min)$", "", text))


def percent(share: float) -> str:
    """A change, signed.

    >>> percent(0.034), percent(-0.2), percent(0.0001)
    ('+3.4 %', '−20 %', '0 %')
    """
    text = f"{100 * share:+.1f}" if abs(share) < 0.0995 else f"{100 * share:+,.0f}"
    return "0 %" if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}") + " %"


def verdict(report: Mapping[str, Any]) -> str:
    """One sentence on how it went.

    >>> verdict({"steps": 40, "budget": {"memory": 600 << 20}, "measured": {"process_bytes": 500 << 20}})
    'Trained 40 steps inside 600 MiB.'
    """
    steps, used = steps_done(report), figure_of(report, "measured", "process_bytes")
    budget, plain = figure_of(report, "budget", "memory"), figure_of(report, "plain", "process_bytes")
    if not steps and used is None:
        return "Nothing was measured in this run."
    sentence = f"Trained {steps:,} step{'s' * (steps != 1)}" if steps else "Trained"
    if used is not None and budget is not None:
        over = f", but reached {bytes_text(used)}, above the budget of {bytes_text(budget)}"
        sentence += f" inside {bytes_text(budget)}" if used <= budget else over
    elif used is not None or budget is not None:
        sentence += f" in {bytes_text(used)}" if used is not None else f" with a budget of {bytes_text(budget or 0)}"
    if plain is not None:
        sentence += f"; plain training would have needed {bytes_text(plain)}"
    return sentence + "."


# Drawing


@dataclass(frozen=True)
class Scale:
    """Where a value goes: low at `start`, high at `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, unit: float = 1.0) -> list[float]:
    """Three to six round values that enclose low and high; round in multiples of `unit`.

    >>> ticks(0, 37), ticks(2.3, 5.5)
    ([0.0, 10.0, 20.0, 30.0, 40.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    """
    raw = ((high - low) or abs(high) or 1.0) / 4 / unit
    power = 10.0 ** floor(log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= raw * 0.999) * unit
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(step * place, 12) for place in range(first, max(last, first + 1) + 1)]


def bytes_unit(top: float) -> float:
    return float(1024 ** min(3, int(log(max(top, 1.0), 1024))))


def seconds_unit(top: float) -> float:
    return 3600.0 if top > 7200 else 60.0 if top > 120 else 1.0


def thin(points: Sequence[Point], how: Callable[[Sequence[float]], float]) -> list[Point]:
    """At most MOST_POINTS points: neighbours become one, at the last one's place, with how(values) as its value."""
    size = ceil(len(points) / MOST_POINTS) or 1
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], how([value for _, value in group])) for group in groups]


def drawing(label: str, body: str) -> str:
    name = escape(label)
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">\n<title>{name}</title>\n{body}</svg>')


def upright(marks: Sequence[float], y: Scale, text: Callable[[float], str], name: str) -> str:
    """Grid lines with their values, and the axis's name above them."""
    grid = (f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(mark)}" y2="{y(mark)}"/>'
            f'<text x="{LEFT - 8}" y="{y(mark) + 4}" text-anchor="end">{text(mark)}</text>' for mark in marks)
    return lines([*grid, f'<text x="0" y="12">{name}</text>'])


def along(marks: Sequence[float], x: Scale, text: Callable[[float], str], name: str) -> str:
    """Values below the plot, and the axis's name below them."""
    anchors = ("start" if x(mark) < LEFT + 8 else "end" if x(mark) > RIGHT - 12 else "middle" for mark in marks)
    values = (f'<text x="{x(mark)}" y="{BOTTOM + 17}" text-anchor="{anchor}">{text(mark)}</text>'
              for mark, anchor in zip(marks, anchors, strict=True))
    below = BOTTOM + (33 if marks else 17)
    return lines([*values, f'<text x="{(LEFT + RIGHT) / 2}" y="{below}" text-anchor="middle">{name}</text>'])


def limit(budget: float | None, y: Scale) -> str:
    """The budget as a line, if it is in the plot."""
    if budget is None or not y.low <= budget <= y.high:
        return ""
    return (f'<line class="limit" x1="{LEFT}" x2="{RIGHT}" y1="{y(budget)}" y2="{y(budget)}"/>'
            f'<text class="limit-text" x="{RIGHT}" y="{y(budget) - 6}" text-anchor="end">budget {bytes_text(budget)}</text>\n')


def memory_marks(top: float, budget: float | None) -> list[float]:
    """Ticks from zero, up to the budget if that leaves most of the plot to the figures."""
    top = max(top, budget) if budget is not None and budget <= 1.7 * top else top
    return ticks(0, max(top, 1.0), bytes_unit(top))


def curve(points: Sequence[Point], x: Scale, y: Scale, colour: str) -> str:
    """A line through the points, with a dot at its end."""
    path = " ".join(f"{x(place)},{y(value)}" for place, value in points)
    return (f'<polyline class="curve" style="stroke:var(--{colour})" points="{path}"/>\n'
            f'<circle style="fill:var(--{colour})" cx="{x(points[-1][0])}" cy="{y(points[-1][1])}" r="3.5"/>\n')


def strip(label: str, spans: Iterable[tuple[float, float, str]], mark: float | None = None) -> str:
    """A flat bar from 0 to 1 made of (from, to, colour), and a mark on it."""
    name = escape(label)
    body = "".join(f'<rect x="{1000 * start:.1f}" width="{max(0.0, 1000 * (end - start)):.1f}" height="20" '
                   f'style="fill:var(--{colour})"/>' for start, end, colour in spans)
    if mark is not None:
        body += "".join(f'<path d="M{1000 * mark:.1f} 0v20" class="{kind}"/>' for kind in ("gap", "mark"))
    return (f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="{name}"><title>{name}</title>'
            f"{body}</svg>")


# Sections, from top to bottom


def top(report: Mapping[str, Any]) -> str:
    flags = "".join(f"<span>{escape(f'{name} {value}')}</span>" for name, value in inner(report, "flags").items())
    said = glued(escape(verdict(report)))
    return (f'<header class="wide">\n<h1>{job_text(report)}{flags}</h1>\n<p class="verdict">{said}</p>\n'
            f"{gauge(report)}</header>")


def gauge(report: Mapping[str, Any]) -> str:
    """This run and plain training on one scale, with the budget across."""
    budget = figure_of(report, "budget", "memory")
    used = figure_of(report, "measured", "process_bytes")
    found = [("This run", used, "alert" if used and budget and used > budget else "update"),
             ("Plain training", figure_of(report, "plain", "process_bytes"), "other")]
    rows = [(name, size, colour) for name, size, colour in found if size]
    if not rows:
        return ""
    most = max([size for _, size, _ in rows] + [1.02 * (budget or 0)])
    bars = (f"<p><span>{name}</span><b>{bytes_text(size)}</b></p>"
            + strip(f"{name}: {bytes_text(size)}", [(0, size / most, colour)], budget / most if budget else None)
            for name, size, colour in rows)
    note = f'<p class="note">budget {bytes_text(budget)}</p>\n' if budget else ""
    return '<div class="gauge">\n' + lines(f"<div>{bar}</div>" for bar in bars) + note + "</div>\n"


def comparison(report: Mapping[str, Any]) -> str:
    """The table of predicted beside measured."""
    asked = (("Tensors", "peak_bytes", bytes_text), ("Process", "process_bytes", bytes_text),
             ("One step", "step_seconds", seconds_text))
    sides = ("predicted", "measured", "plain")
    rows = [(name, text, [figure_of(report, side, key) for side in sides]) for name, key, text in asked]
    body = [row(name, text, *values) for name, text, values in rows if any(value is not None for value in values)]
    body += [budget_row(report)] if figure_of(report, "budget", "memory") else []
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "Predicted", "Measured", "Difference", "Plain"))
    note = ("Highest memory at any moment, and the time of one step. The difference is measured against predicted; "
            "plain is what training without any technique would need.")
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines(body)}</tbody>\n</table>"
    return section("Predicted and measured", note, table) if body else ""


def row(name: str, text: Callable[[float], str], predicted: float | None, measured: float | None, plain: float | None) -> str:
    change = percent(measured / predicted - 1) if measured is not None and predicted else NONE
    first, second, last = (NONE if value is None else text(value) for value in (predicted, measured, plain))
    return f'<tr><th scope="row">{name}</th><td>{first}</td><td>{second}</td><td>{change}</td><td>{last}</td></tr>'


def budget_row(report: Mapping[str, Any]) -> str:
    budget, used = figure_of(report, "budget", "memory") or 0, figure_of(report, "measured", "process_bytes")
    left = "" if used is None else f", {bytes_text(budget - used)} left" if used <= budget else (
        f', <span class="over">{bytes_text(used - budget)} too much</span>')
    return f'<tr class="budget"><th scope="row">Budget</th><td colspan="4">{bytes_text(budget)} for the process{left}</td></tr>'


def blocks(report: Mapping[str, Any]) -> str:
    """Memory by block, in the order in which the blocks run."""
    found = [(str(name), size) for name, size in pairs(report.get("blocks"))]
    if not found or max(size for _, size in found) <= 0:
        return ""
    where, most = max(found, key=lambda block: block[1])
    budget = figure_of(report, "budget", "memory")
    marks = memory_marks(most, budget)
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    label = f"Tensor memory by block through one step; highest {bytes_text(most)} in {where}"
    body = upright(marks, y, lambda mark: tidy(bytes_text(mark)), "tensors") + bars(fewer(found), y) + limit(budget, y)
    note = f"Highest tensor memory while each block runs. The top is {bytes_text(most)}, in {escape(where)}."
    if budget:
        lies = "is for the whole process" if budget <= y.high else "for the whole process lies above this scale"
        note += f" The budget of {bytes_text(budget)} {lies}."
    legend = "".join(f'<li><i style="background:var(--{colour_of(phase)})"></i>{escape(phase)}</li>'
                     for phase in dict.fromkeys(phase_of(name) for name, _ in found))
    drawn = drawing(label, body + along([], y, str, "time through one step →"))
    return section("Memory through one step", note, f'<figure>\n{drawn}\n<ul class="legend">{legend}</ul>\n</figure>')


def phase_of(name: str) -> str:
    return name.split(" ", 1)[0]


def colour_of(phase: str) -> str:
    return phase if phase in PHASES else "other"


def fewer(found: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """At most about MOST_BARS blocks: neighbours of one phase become the highest of them.

    >>> len(fewer([(f"forward {place}", place) for place in range(1000)]))
    112
    """
    size = ceil(len(found) / MOST_BARS)
    phases = (list(group) for _, group in groupby(found, lambda block: phase_of(block[0])))
    return [max(phase[start : start + size], key=lambda block: block[1])
            for phase in phases for start in range(0, len(phase), size)]


def bars(found: Sequence[tuple[str, float]], y: Scale) -> str:
    pitch = (RIGHT - LEFT) / len(found)
    gap = min(3.0, 0.2 * pitch)
    return lines(f'<rect x="{LEFT + place * pitch + gap / 2:.1f}" y="{y(size)}" width="{pitch - gap:.1f}" '
                 f'height="{BOTTOM - y(size):.1f}" style="fill:var(--{colour_of(phase_of(name))})">'
                 f"<title>{escape(name)}: {bytes_text(size)}</title></rect>" for place, (name, size) in enumerate(found))


def parts(report: Mapping[str, Any]) -> str:
    """What is alive at the highest moment, as a stacked bar and a list."""
    sizes = [(str(name), size) for name, size in pairs(list(inner(inner(report, "measured"), "parts").items())) if size > 0]
    sizes.sort(key=lambda part: -part[1])
    total, start, spans, rows = sum(size for _, size in sizes), 0.0, [], []
    for name, size in sizes:
        colour, end = name if name in PARTS else "other", start + size / total
        spans.append((start, end - 0.003, colour))
        rows.append(f'<li><div><i style="background:var(--{colour})"></i>{escape(name)}</div>'
                    f"<span>{bytes_text(size)}</span><span>{share_text(size / total)}</span></li>")
        start = end
    label = "The peak is made of " + ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes)
    note = f"At the highest moment the tensors take {bytes_text(total)}."
    body = f'<figure class="stack">\n{strip(label, spans)}\n<ul class="parts">\n{lines(rows)}</ul>\n</figure>'
    return section("What the peak is made of", note, body) if sizes else ""


def share_text(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "&lt; 1 %"


def losses(report: Mapping[str, Any]) -> str:
    """The loss by step."""
    found = list(report.get("losses") or ())
    points = [(float(step), float(loss)) for step, loss in enumerate(found, 1) if number(loss) is not None]
    if not points:
        return ""
    size, drawn = ceil(len(points) / MOST_POINTS), thin(points, fmean)
    marks = ticks(min(loss for _, loss in drawn), max(loss for _, loss in drawn))
    x, y = Scale(1, len(found), LEFT, RIGHT), Scale(marks[0], marks[-1], BOTTOM, TOP)
    below = [1.0] + [mark for mark in ticks(0, len(found)) if 1 < mark <= len(found) and mark == int(mark)]
    note = f"From {points[0][1]:.4g} at the first step to {points[-1][1]:.4g} at the last."
    note += f" Each point is the mean of {size} steps." if size > 1 else ""
    note += f" {len(found) - len(points):,} losses were not numbers." if len(points) < len(found) else ""
    body = (upright(marks, y, "{:.6g}".format, "loss") + along(below, x, lambda mark: f"{mark:,.0f}", "step")
            + curve(drawn, x, y, "forward"))
    return section("Loss", note, f"<figure>\n{drawing(f'Loss by step. {note}', body)}\n</figure>")


def process(report: Mapping[str, Any]) -> str:
    """The memory of the process by time."""
    points = [(float(when), float(size)) for when, size in pairs(report.get("samples_process")) if number(when) is not None]
    if len(points) < 2:
        return ""
    most, budget = max(size for _, size in points), figure_of(report, "budget", "memory")
    marks, times = memory_marks(most, budget), ticks(0, points[-1][0], seconds_unit(points[-1][0]))
    x, y = Scale(0, points[-1][0], LEFT, RIGHT), Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"The whole process, libraries included: at most {bytes_text(most)}."
    below = along([time for time in times if time <= x.high], x, lambda time: tidy(seconds_text(time)), "time")
    body = (upright(marks, y, lambda mark: tidy(bytes_text(mark)), "process") + below
            + curve(thin(points, max), x, y, "update") + limit(budget, y))
    return section("Memory over the run", note, f"<figure>\n{drawing(f'Process memory over time. {note}', body)}\n</figure>")


def plan(report: Mapping[str, Any]) -> str:
    """The techniques, and why each is there."""
    if report.get("techniques") is None:
        return ""
    rows = [f"<li><code>{escape(technique_text(one))}</code><p>{escape(str(one.get('why') or ''))}</p></li>"
            for one in report["techniques"]]
    notes = {True: "Exact: the weights are those that plain training gives.",
             False: "Not exact: the weights differ from those of plain training."}
    note = notes.get(report["exact"], "") if isinstance(report.get("exact"), bool) else ""
    body = f'<ul class="rows">\n{lines(rows)}</ul>' if rows else "<p>Plain training, no technique.</p>"
    return section("The plan", note, body)


def technique_text(one: Mapping[str, Any]) -> str:
    """A technique as one would write it.

    >>> technique_text({"name": "Checkpoint", "knobs": {"every": 2}})
    'Checkpoint(every=2)'
    """
    knobs = ", ".join(f"{name}={value}" for name, value in inner(one, "knobs").items())
    return f"{one.get('name') or 'technique'}({knobs})" if knobs else str(one.get("name") or "technique")


def runners_up(report: Mapping[str, Any]) -> str:
    """The plans that were not taken."""
    found = list(report.get("runners_up") or ())
    rows = [f"<li><code>{escape(str(one.get('text') or 'plain'))}</code><p>{runner_text(one)}</p></li>"
            for one in found[:MOST_ROWS]]
    rows += [f"<li><p>and {len(found) - MOST_ROWS:,} more</p></li>"] if len(found) > MOST_ROWS else []
    return section("Runners-up, and why they lost", "", f'<ul class="rows">\n{lines(rows)}</ul>') if rows else ""


def runner_text(one: Mapping[str, Any]) -> str:
    size, seconds = number(one.get("process_bytes")), number(one.get("step_seconds"))
    said = [f"<b>{escape(str(one['lost']))}</b>" if one.get("lost") else "", bytes_text(size) if size is not None else "",
            f"{seconds_text(seconds)} a step" if seconds is not None else ""]
    return glued(" · ".join(word for word in said if word))


def shown(report: Mapping[str, Any]) -> str:
    """What the job has to show for it."""
    text = str(report.get("shown") or "").strip("\n")
    note = f"The first {MOST_TEXT:,} of {len(text):,} characters." if len(text) > MOST_TEXT else ""
    return section("A look at the result", note, f'<pre tabindex="0">{escape(text[:MOST_TEXT])}</pre>') if text else ""


def footer(report: Mapping[str, Any]) -> str:
    weights = f"sha256 {report['weights_sha256']}" if report.get("weights_sha256") else ""
    facts = [("Run", report.get("run"), ""), ("Weights", weights, ' class="hash"'), ("How sure", report.get("sure"), "")]
    rows = [f"<dt>{name}</dt><dd{kind}>{escape(str(value))}</dd>" for name, value, kind in facts if value]
    return '<footer class="wide">' + (f"<dl>\n{lines(rows)}</dl>" if rows else "shoestring") + "</footer>"
