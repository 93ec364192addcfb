"""The tables and plots of README.md, from what results.py measured; a person never types a number."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

GROUPS = ("central", "alone", "plain", "private", "compressed", "malicious")
TITLES = {"private": "private (delta 1e-5)", "malicious": "20 % malicious", "compressed": "compressed"}


def write(kept: Mapping[str, Any], data: Iterable[Any], readme: Path) -> None:
    parts = []
    for one in data:
        found = {
            key.split(" | ")[1]: value
            for key, value in kept.items()
            if key.startswith(f"{one.name} | ") and key.endswith(f"| {one.rounds} rounds")
        }
        found = dict(sorted(found.items(), key=lambda item: GROUPS.index(item[0].partition(":")[0])))  # stable
        if found:
            parts += [
                f"\n### {one.title}, {one.rounds} rounds\n",
                table(one, found),
                f"\n![]({one.name}.png)\n",
                "Measured on " + next(iter(found.values()))["machine"] + ".\n",
            ]
            plot(one, found, readme.parent / f"{one.name}.png")
    inserted(readme, "results", "python benchmarks/federated/results.py", "\n".join(parts))


def inserted(readme: Path, name: str, command: str, text: str) -> None:
    """Put what a script measured between its marks in README.md."""
    begin, end = f"<!-- {name}: what stands here is written by a script -->", f"<!-- end of {name} -->"
    whole = readme.read_text()
    before, found, rest = whole.partition(begin)
    assert found and end in rest, f"{readme} has no place for {name}"
    readme.write_text(f"{before}{begin}\n`{command}`\n{text}\n{end}{rest.partition(end)[2]}")


def machine() -> str:
    import torch

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, Python {platform.python_version()}"


def table(data: Any, found: Mapping[str, Any]) -> str:
    metric, plain = data.metric.replace("_", " "), found.get("plain: FedAvg", {}).get("bytes_up")
    lines = [
        f"| setting | {metric} | on a device's own | up | times less | epsilon | techniques |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        if "failed" in result:
            lines.append(f"| {called(name)} | failed: {' '.join(result['failed'].split())[:120]} | | | | | |")
            continue
        up, used = result.get("bytes_up"), result.get("techniques") or ()
        less = plain / up if plain and up and name.startswith("compressed") else None
        cells = [
            number(result["metrics"].get(data.metric)),
            number(result.get("own")),
            size(up),
            number(less, 1),
            number(result.get("epsilon"), 2),
            ", ".join(one["name"] for one in used),
        ]
        lines.append(f"| {called(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def called(name: str) -> str:
    group, _, setting = name.partition(": ")
    usual = {"central": "all records in one place", "alone": "every device alone (mean)"}
    return usual.get(name, f"{TITLES[group]}: {setting}" if group in TITLES else setting)


def number(value: float | None, places: int = 3) -> str:
    return "" if value is None or value == float("inf") else f"{value:,.{places}f}"


def size(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.1f} MB"


def plot(data: Any, found: Mapping[str, Any], path: Path) -> None:
    """Training loss by round, the settings of a group together beside plain FedAvg; and bars of the metric."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9))
    good = {
        name: result for name, result in found.items() if "failed" not in result and data.metric in result["metrics"]
    }
    worst = max(good.get("plain: FedAvg", {}).get("losses", [1.0]))
    for axis, group in zip(axes.flat, ("private", "compressed", "malicious"), strict=False):
        for name, result in good.items():
            if name.startswith((f"{group}:", "plain:")) and "losses" in result:
                plain = name.startswith("plain:")
                losses = smoothed(result["losses"])
                axis.plot(
                    range(1, len(losses) + 1),
                    losses,
                    label=called(name).partition(": ")[2] or called(name),
                    linewidth=1.2,
                    color="black" if plain else None,
                    linestyle="--" if "sign-flip" in name else "-",
                )
        axis.set(
            xlabel="round",
            title=TITLES[group],
            ylabel="training loss of devices, mean of 5 rounds",
            ylim=(0, 1.2 * worst),
        )
        axis.legend(fontsize=7)
    bars(axes[1][1], data, good)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def smoothed(values: Sequence[float], over: int = 5) -> list[float]:
    """The mean of the last few, from the first on."""
    windows = [values[max(0, place - over + 1) : place + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def bars(axis: Any, data: Any, good: Mapping[str, Any]) -> None:
    """The metric of everything, with its number; what is beyond three times the best is cut off."""
    names, values = list(good)[::-1], [good[name]["metrics"][data.metric] for name in reversed(good)]
    most = max(values) if data.most else 3 * min(values)
    axis.barh([called(name) for name in names], [min(value, most) for value in values], color="#4477aa")
    for place, value in enumerate(values):
        axis.text(min(value, most), place, f" {value:.3g}", va="center", fontsize=7)
    axis.set(
        xlabel=data.metric.replace("_", " ") + (" (more is better)" if data.most else " (less is better)"),
        xlim=(0, 1.12 * most),
    )
    axis.tick_params(axis="y", labelsize=7)
