"""Terminal output of `shoestring compress`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from shoestring.compression.room import CompressPlan
    from shoestring.compression.session import CompressSession
    from shoestring.core.figures import Figures
    from shoestring.show.terminal import Screen


def plan_text(session: CompressSession, screen: Screen) -> str:
    """The plan, its alternatives, and how weights are stored."""
    from shoestring.compression.room import COLUMNS
    from shoestring.show.outcome import outcome_text
    from shoestring.show.terminal import plain

    stored = plain("stored: " + "; ".join(kinds(session.plan)))
    return outcome_text(session.outcome, COLUMNS, screen, [stored])


def kinds(plan: CompressPlan) -> list[str]:
    """How many numbers are stored in each format."""
    from math import prod

    found: dict[str, int] = {}
    for layer in plan.details.layers():
        form = (
            layer["form"]
            if layer["form"] != "plain"
            else "as they are"
            if not layer["technique"]
            else layer["technique"].lower()
        )
        key = f"{layer['bits']:.1f} bits ({form})"
        found[key] = found.get(key, 0) + prod(layer["shape"])
    return [f"{count:,} numbers in {key}" for key, count in sorted(found.items(), key=lambda one: -one[1])]


def of_output(one: Mapping[str, Any], outputs: int) -> str:
    return f" of {one['name']}" if outputs > 1 else ""


def error_text(error: float | None) -> str:
    return "" if error is None else f" +- {error:.1g}"


def predicted_text(one: Mapping[str, Any]) -> str:
    mean = one["mean"]["predicted"]
    return "" if mean is None else f"; predicted mean {mean:.6f}{error_text(one['predicted_standard_error'])}"


def figures_in(report: Mapping[str, Any]) -> Figures:
    """Predicted and measured figures of the report."""
    from shoestring.compression.session import QUANTITIES
    from shoestring.core.figures import figures

    latency, fidelity = report["latency_ms"], report["fidelity"]["mean"]

    def side(name: str) -> dict[str, float | None]:
        found = {key: report[key][name] for key in ("size_bytes", "memory_bytes")}
        found |= {f"{key}_seconds": None if (ms := latency[key][name]) is None else ms / 1e3 for key in ("p50", "p99")}
        return found | {"damage": None if fidelity[name] is None else 1 - fidelity[name]}

    return figures(QUANTITIES, side("predicted")).with_measured(side("measured"))


def metric_text(name: str, one: Mapping[str, Any]) -> str:
    from shoestring.compression.calibration.metric import MetricValue

    interval = None if one["interval"] is None else (one["interval"][0], one["interval"][1])
    value = MetricValue(one["measured"], one["n"], one["of"], one["standard_error"], interval)
    return f"{name}: {value}, the original {one['original']:.5g}"


def measured_text(report: Mapping[str, Any], screen: Screen) -> str:
    """Predicted and measured figures, then the job's own metric."""
    from shoestring.show.terminal import table

    rows = [["", "predicted", "measured", "measured is"]]
    rows += [
        [one.quantity.label, one.quantity.text(one.predicted), one.quantity.text(one.measured), one.off_text]
        for one in figures_in(report)
    ]
    told = report["fidelity"]["outputs"]
    lines = [table(rows, right=(1, 2), screen=screen), ""]
    lines += [
        f"fidelity{of_output(one, len(told))} ({one['by']}: {one['why']}; {one['samples']:,} samples that nothing was chosen by): "
        f"mean {one['mean']['measured']:.6f}{error_text(one['standard_error'])}, worst {one['worst']['measured']:.6f}"
        f"{predicted_text(one)}"
        for one in told
    ]
    if len(told) > 1:
        lines.append(f"the worst leads: {report['fidelity']['output']}")
    lines += [
        metric_text(name, one)
        for name, one in report["metric"].items()
        if one["measured"] is not None and one["original"] is not None
    ]
    return "\n".join(lines)
