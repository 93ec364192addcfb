"""Results as tables of text, the same for terminal and page."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.core.units import bytes_text
from shoestring.federated.tasks.compare import Change, Comparison
from shoestring.federated.tasks.evaluate import ALL, Estimate, Evaluation
from shoestring.federated.tasks.statistics.totals import Telemetry
from shoestring.federated.tasks.tune import TriedSetting, Tuning


@dataclass(frozen=True)
class ReportTable:
    title: str
    rows: tuple[tuple[str, ...], ...]  # the first is the heading
    right: tuple[int, ...]  # right-aligned columns
    notes: tuple[str, ...] = ()


def number_text(value: float | None, signed: bool = False) -> str:
    """
    >>> number_text(0.123456), number_text(-3.0, signed=True), number_text(None), number_text(12345.6)
    ('0.1235', '-3', '', '1.235e+04')
    """
    return "" if value is None else f"{value:{'+' if signed else ''}.4g}"


def mean_text(estimate: Estimate | None) -> str:
    return f"{number_text(estimate.mean)} ± {estimate.error:.2g}" if estimate is not None else "withheld"


def group_text(group: str) -> str:
    return "all" if group == ALL else group


def telemetry_text(telemetry: Telemetry) -> str:
    """
    >>> telemetry_text(Telemetry(12, 10, 20, 3.0, 1000, 20000, (("RuntimeError", 2),)))
    '10 of 12 devices answered, 20 trainings, 19.5 KiB down, 1,000 B up; errors: 2 RuntimeError'
    """
    errors = "; errors: " + ", ".join(f"{count} {kind}" for kind, count in telemetry.errors) if telemetry.errors else ""
    return (
        f"{telemetry.devices:,} of {telemetry.asked:,} devices answered, {telemetry.trainings:,} trainings, "
        f"{bytes_text(telemetry.down)} down, {bytes_text(telemetry.up)} up{errors}"
    )


def failed_notes(result: Evaluation | Tuning | Comparison) -> tuple[str, ...]:
    return tuple(
        f"{name}: no finite number on {count:,} device{'s' * (count != 1)}, which its figures leave out"
        for name, count in result.failed.items()
    )


def evaluation_tables(result: Evaluation) -> tuple[ReportTable, ...]:
    """A table for every metric."""
    tables = []
    for metric in dict.fromkeys(one.metric for one in result.measured):
        rows = [
            (
                one.candidate,
                group_text(one.group),
                one.when,
                f"{one.devices:,}",
                mean_text(one.by_sample),
                mean_text(one.by_device),
            )
            for one in result.measured
            if one.metric == metric
        ]
        heading = ("candidate", "group", "training", "devices", "mean over samples", "mean over devices")
        tables.append(ReportTable(metric, (heading, *rows), (3, 4, 5)))
    return (
        *tables,
        notes_table(
            result, f"± is one standard error between devices; results are released for at least {result.least} devices"
        ),
    )


def notes_table(result: Evaluation | Tuning | Comparison, *more: str) -> ReportTable:
    """A table without rows: notes to print below the others."""
    withheld = tuple(f"withheld: {one}" for one in result.withheld)
    return ReportTable("", (), (), (*more, *failed_notes(result), *withheld, telemetry_text(result.telemetry)))


def tuning_tables(result: Tuning) -> tuple[ReportTable, ...]:
    way = "largest" if result.most else "least"
    rung = ["rung"] if len(result.rungs) > 1 else []
    heading = ("setting", *rung, "devices", f"{result.metric} over {result.by}", "behind the best", "")
    rows = [
        (
            one.candidate.name,
            *([str(one.rung + 1)] if len(result.rungs) > 1 else []),
            f"{one.devices:,}",
            *standing(one, one == result.best),
        )
        for one in result.tried
    ]
    tables = [
        ReportTable(
            f"{result.best.candidate.name} has the {way} {result.metric}",
            (heading, *rows),
            tuple(range(1, len(heading) - 1)),
        )
    ]
    if len(result.rungs) > 1:
        rungs = [
            (
                str(place + 1),
                str(one.settings),
                f"{one.devices:,}",
                f"{one.telemetry.trainings:,}",
                bytes_text(one.telemetry.up),
            )
            for place, one in enumerate(result.rungs)
        ]
        tables.append(
            ReportTable("rungs", (("rung", "settings", "devices", "trainings", "up"), *rungs), (0, 1, 2, 3, 4))
        )
    said = "± is one standard error; `as good`: not significantly worse than the best of the rung, corrected for all its settings"
    return (*tables, notes_table(result, said))


def standing(one: TriedSetting, best: bool) -> tuple[str, str, str]:
    if one.mean is None or one.error is None or one.behind is None or one.behind_error is None:
        return "", "", "diverged"
    behind = "" if not one.behind_error else f"{number_text(one.behind)} ± {one.behind_error:.2g}"
    return mean_text(Estimate(one.mean, one.error)), behind, "best" if best else "as good" if one.as_good else "worse"


def comparison_tables(result: Comparison) -> tuple[ReportTable, ...]:
    """A table for every metric: all devices, then groups."""
    tables = []
    percent = f"{100 * result.level:g} % interval"
    for metric in dict.fromkeys(one.metric for one in result.changes):
        found = [one for one in result.changes if one.metric == metric]
        grouped = len(found) > 1
        heading = (
            "group",
            "devices",
            "A",
            "B",
            "delta",
            percent,
            "p",
            *(["p of all groups"] if grouped else []),
            "verdict",
        )
        rows = [change_row(one, grouped) for one in found]
        tables.append(ReportTable(metric, (heading, *rows), tuple(range(1, len(heading) - 1))))
    design = (
        "the same devices measured both"
        if result.design == "paired"
        else "one half of the devices measured A, the other B"
    )
    said = [f"A: {result.a}; B: {result.b}; means over {result.by}, {result.when} the devices' own training; {design}"]
    if any(one.group != ALL for one in result.changes):
        said.append(
            "every interval is for one group by itself; verdicts on groups are corrected for all groups of the metric (Holm), and "
            "`perhaps` means significant for that group alone only"
        )
    if any(one.percent is None or one.low is None for one in result.changes):
        said.append(
            "without an interval: A's mean is not significantly different from 0, and a percentage of it means nothing"
        )
    return (*tables, notes_table(result, *said))


def change_row(one: Change, grouped: bool) -> tuple[str, ...]:
    devices = (
        f"{one.devices[0]:,}" if one.devices[0] == one.devices[1] else f"{one.devices[0]:,} and {one.devices[1]:,}"
    )
    delta = (
        f"{number_text(one.percent, signed=True)} %" if one.percent is not None else number_text(one.delta, signed=True)
    )
    interval = (
        f"{number_text(one.low, signed=True)} to {number_text(one.high, signed=True)} %"
        if one.low is not None
        else "none"
    )
    adjusted = (f"{one.holm:.2g}" if one.group != ALL else "",) if grouped else ()
    return (
        group_text(one.group),
        devices,
        number_text(one.a),
        number_text(one.b),
        delta,
        interval,
        f"{one.p:.2g}",
        *adjusted,
        one.verdict,
    )
