"""What a person sees in the terminal: tables, bars and the progress line, as text."""
from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from shoestring.core.exactness import stated_in
from shoestring.core.units import bytes_text, seconds_text


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Rows of cells as aligned columns; the first row is the heading.

    >>> print(table([["plan", "memory"], ["plain", "1 GiB"]], right=[1]))
    plan   memory
    -----  ------
    plain   1 GiB
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_right = set(right)

    def line(row: Sequence[str]) -> str:
        cells = (cell.rjust(width) if column in to_right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


def bar(share: float, width: int = 24) -> str:
    """A horizontal bar.

    >>> bar(0.5, 4)
    '██░░'
    """
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def plan_name(plan: dict[str, Any]) -> str:
    """A plan of the JSON in one line."""
    return " + ".join(technique_name(one) for one in plan["techniques"]) or "plain"


def technique_name(one: dict[str, Any]) -> str:
    knobs = ", ".join(f"{name}={value!r}" for name, value in one["knobs"].items() if value not in (0, "", None))
    return f"{one['name']}({knobs})"


def plan_row(name: str, plan: dict[str, Any], why: str) -> list[str]:
    return [name, bytes_text(plan["peak_bytes"]), bytes_text(plan["process_bytes"]), seconds_text(plan["step_seconds"]), why]


def plan_text(outcome: dict[str, Any], whys: dict[str, str]) -> str:
    """The planner's outcome for a person."""
    chosen, plain = outcome["chosen"], outcome["plain"]
    width = max(shutil.get_terminal_size((110, 24)).columns - 52, 34)
    level = stated_in(chosen)
    lines = [f"plan for {bytes_text(outcome['memory'])}{f', {level.word}' if level is not None else ''}: {plan_name(chosen)}"]
    lines += [f"  {level.word}: {level.meaning}"] if level is not None else []
    lines += [""]
    lines += [f"  {technique_name(one)}: {whys.get(one['name'], '')}" for one in chosen["techniques"]]
    lines += [""] if chosen["techniques"] else []
    rows = [["", "tensors", "process", "a step", ""],
            plan_row(shortened(plan_name(chosen), width), chosen, "chosen" + (f", {level.word}" if level is not None else "")),
            *([plan_row(plan_name(plain), plain, "the simplest plan" if plain["techniques"] else "no technique")]
              if chosen["techniques"] != plain["techniques"] else []),
            *(plan_row(shortened(plan_name(plan), width), plan, plan["lost"]) for plan in outcome["runners_up"])]
    lines += [table(rows, right=(1, 2, 3)), ""]
    if chosen["traffic_bytes"]:
        lines += [f"to and from the disk: {bytes_text(chosen['traffic_bytes'])} a step, at {bytes_text(chosen['disk_bytes_per_second'])}/s "
                  f"as measured on this machine", ""]
    if chosen["stored_bytes"]:
        lines[-1:] = [f"on the disk of the run: {bytes_text(chosen['stored_bytes'])} of state", ""]
    if chosen["world"] > 1:
        lines += [f"{chosen['world']} workers train together; these are the figures of the largest. {sending(chosen)}", ""]
    lines += [f"the peak is in the {chosen['where']}:"]
    whole = sum(chosen["parts"].values()) or 1
    lines += [f"  {name:<12} {bytes_text(size):>9}  {bar(size / whole)}" for name, size in chosen["parts"].items() if size * 200 > whole]
    if outcome["more_memory"]:
        lines += ["", "what more memory would buy, by the ledger:"]
        lines += [f"  {bytes_text(plan['process_bytes']):>9}  {seconds_text(plan['step_seconds'])} a step with "
                  f"{shortened(plan_name(plan), width)}" for plan in outcome["more_memory"]]
    if outcome["refused"]:
        lines += ["", "not used:"]
        lines += [f"  {one['technique']}: {one['reason']}" for one in outcome["refused"]]
    lines += ["", f"{outcome['tried']:,} combinations tried, {outcome['fitting']:,} fit by the ledger; planned in "
                  f"{seconds_text(outcome['seconds'])}", f"how sure: {chosen['sure']}"]
    return "\n".join(lines)


def sending(plan: dict[str, Any]) -> str:
    """What workers send to each other.

    >>> sending({"sent_bytes": 2048.0, "sent_by_others_bytes": 0.0}), sending({"sent_bytes": 0.0})
    ('Each sends 2.00 KiB a step to the others', 'They send nothing: they share memory')
    """
    if plan.get("sent_by_others_bytes"):
        return (f"The first keeps the weights and sends {bytes_text(plan['sent_bytes'])} a step if all are as fast, less if some are late; "
                f"each of the others sends it {bytes_text(plan['sent_by_others_bytes'])} in each of its own steps")
    return f"Each sends {bytes_text(plan['sent_bytes'])} a step to the others" if plan["sent_bytes"] else (
        "They send nothing: they share memory")


COUNTED = ("peak_bytes", "traffic_bytes", "sent_bytes", "sent_by_others_bytes")   # predicted to the byte


def beside(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """Predicted beside measured."""
    rows = [["", "predicted", "measured", "off by"]]
    for key, name, shown in (("peak_bytes", "tensors", bytes_text), ("process_bytes", "process", bytes_text),
                             ("step_seconds", "a step", seconds_text), ("traffic_bytes", "disk, a step", bytes_text),
                             ("sent_bytes", "sent, a step", bytes_text),
                             ("sent_by_others_bytes", "sent by others, a step of theirs", bytes_text)):
        if key in COUNTED[1:] and not (predicted.get(key) and measured.get(key)):
            continue
        if not isinstance(predicted.get(key), int | float) or not isinstance(measured.get(key), int | float):
            rows.append([name, *("not known" if one.get(key) is None else shown(one[key]) for one in (predicted, measured)), ""])
            continue
        off = predicted[key] / measured[key] - 1 if measured.get(key) else 0.0
        difference = int(predicted[key] - measured[key])
        exact = key in COUNTED and abs(off) < 1e-3
        rows.append([name, shown(predicted[key]), shown(measured[key]), f"{difference:+,} bytes" if exact else f"{off:+.1%}"])
    return table(rows, right=(1, 2, 3))


def progress(step: int, steps: int, loss: float, used: int, budget: int | None, seconds_left: float) -> str:
    """The line that moves while training."""
    memory = f"{bytes_text(used)} of {bytes_text(budget)} {bar(used / budget, 8)}" if budget else bytes_text(used)
    return f"{bar(step / steps, 20)} {step}/{steps}  loss {loss:.3f}  memory {memory}  {seconds_text(seconds_left)} left"
