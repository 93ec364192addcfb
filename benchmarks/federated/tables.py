"""The tables and plots of README.md, from what results.py measured; a person never types a number."""
from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TITLES = {"private": "private (delta 1e-5)", "malicious": "20 % malicious", "compressed": "compressed"}


def write(kept: Mapping[str, Any], data: Iterable[Any], readme: Path) -> None:
    parts = []
    for one in data:
        found = {key.split(" | ")[1]: value for key, value in kept.items()
                 if key.startswith(f"{one.name} | ") and key.endswith(f"| {one.rounds} rounds")}
        if found:
            parts += [f"\n### {one.title}, {one.rounds} rounds\n", table(one, found), f"\n![]({one.name}.png)\n",
                      "Measured on " + next(iter(found.values()))["machine"] + ".\n"]
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

    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
               platform.machine())
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, Python {platform.python_version()}"


def table(data: Any, found: Mapping[str, Any]) -> str:
    metric, plain = data.metric.replace("_", " "), found.get("plain: FedAvg", {}).get("bytes_up")
    lines = [f"| setting | {metric} | on a device's own | up | times less | epsilon | techniques |", "|---|---|---|---|---|---|---|"]
    for name, result in found.items():
        if "failed" in result:
            lines.append(f"| {called(name)} | failed: {' '.join(result['failed'].split())[:120]} | | | | | |")
            continue
        up, used = result.get("bytes_up"), result.get("techniques") or ()
        less = plain / up if plain and up and name.startswith("compressed") else None
        cells = [number(result["metrics"].get(data.metric)), number(result.get("own")), size(up), number(less, 1),
                 number(result.get("epsilon"), 2), ", ".join(one["name"] for one in used)]
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
    """Training loss by round, of everything that has rounds; bars of the metric beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    good = {name: result for name, result in found.items() if "failed" not in result and data.metric in result["metrics"]}
    for name, result in good.items():
        if "losses" in result:
            left.plot(range(1, len(result["losses"]) + 1), result["losses"], label=called(name), linewidth=1)
    left.set(xlabel="round", ylabel="training loss of the devices", yscale="log")
    left.legend(fontsize=7)
    names = list(good)[::-1]
    right.barh([called(name) for name in names], [good[name]["metrics"][data.metric] for name in names], color="#4477aa")
    right.set(xlabel=data.metric.replace("_", " ") + (" (more is better)" if data.most else " (less is better)"))
    right.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
