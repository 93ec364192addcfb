"""The tables and plots of README.md, from what results.py measured; a person never types a number."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: written by results.py -->", "<!-- end of results -->"
TITLES = {"private": "private (delta 1e-5)", "malicious": "20 % malicious", "compressed": "compressed"}


def write(kept: Mapping[str, Any], data: Iterable[Any], rounds: int, readme: Path) -> None:
    parts = [BEGIN]
    for one in data:
        found = {key.split(" | ")[1]: value for key, value in kept.items()
                 if key.startswith(f"{one.name} | ") and key.endswith(f"| {rounds} rounds")}
        if found:
            parts += [f"\n### {one.title}, {rounds} rounds\n", table(one, found), f"\n![]({one.name}.png)\n",
                      "Measured on " + next(iter(found.values()))["machine"] + ".\n"]
            plot(one, found, readme.parent / f"{one.name}.png")
    text = readme.read_text() if readme.exists() else f"# Federated learning, simulated\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(before + "\n".join([*parts, END]) + after)


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
