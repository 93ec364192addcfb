"""Time to a loss when one of four workers is four times slower: waiting for it, not waiting, dropping it; writes README.md.

    python benchmarks/stragglers/run.py [processes]

Every way trains the same job (job.py) with the same rate in as many processes of one thread each, until the mean loss of 20 steps is at
the target. The time is that of the steps, by the first worker's clock.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring.core.technique import text
from shoestring.core.units import seconds_text
from shoestring.processes.group.launch import run_group
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.events.event import Begun, Event, Stepped
from shoestring.runs.folder import Folder
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.evidence.tasks import specs_of
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.technique import TrainingTechnique as Technique

HERE = Path(__file__).parent
TARGET, LATELY = 2.4, 20  # loss, as a mean of so many steps
MOST, LONGEST = 900, 240.0  # steps and seconds, after which a way has failed
ASKED = 1.5  # times as fast as waiting
FLAGS = {"rate": 0.001, "times": 4.0, "stretch": 2.0}  # of the rates 0.0005, 0.001, 0.002, 0.004 the best for Average
WAYS: tuple[Technique, ...] = (
    DataParallel(),
    Asynchronous(),
    Asynchronous(correct=False),
    Asynchronous("hogwild"),
    Asynchronous("hogwild", correct=False),
    DropStragglers(),
)


@dataclass(frozen=True)
class Found:
    seconds: float | None  # until the target; None: it was not reached
    steps: int  # done by then
    loss: float  # then
    state: Mapping[str, Any]


def main(processes: int = 4) -> None:
    alone = raced(DataParallel(), processes, slow=-1)
    print("nobody slowed", alone, file=sys.stderr, flush=True)
    found = {}
    for way in WAYS:
        found[way] = raced(way, processes, slow=processes - 1)
        print(text(way), found[way], file=sys.stderr, flush=True)
    (HERE / "README.md").write_text(written(alone, found, processes))
    print((HERE / "README.md").read_text())


def raced(way: Technique, processes: int, slow: int) -> Found:
    """Train in a group until the target is reached."""
    lately: deque[float] = deque(maxlen=LATELY)
    course = {"seconds": 0.0, "steps": 0, "loss": float("nan")}
    running: list[int] = []  # the first worker, until it is asked to stop

    def follow(event: Event) -> None:
        if isinstance(event, Begun):
            running.append(event.pid)
        if not isinstance(event, Stepped) or not running:
            return
        lately.append(event.loss)
        course["seconds"] += event.seconds
        course["steps"], course["loss"] = event.step, sum(lately) / len(lately)
        if reached(course["loss"], lately) or course["seconds"] > LONGEST:
            os.kill(running.pop(), signal.SIGTERM)  # it saves, and ends the others

    with tempfile.TemporaryDirectory() as place:
        run_group(
            TrainTask(
                file=str(HERE / "job.py"),
                flags=FLAGS | {"slow": slow},
                techniques=specs_of([way]),
                steps=MOST,
                recording=RecordingSettings(place, Cadence(seconds=1e9)),
            ),
            {},
            follow,
            devices=processes,
        )
        saved = newest_good(Folder(Path(place)).checkpoints)[0]
        state = saved.state()["parts"].get("pushes", {}) if saved else {}
    return Found(
        course["seconds"] if reached(course["loss"], lately) else None, int(course["steps"]), course["loss"], state
    )


def reached(loss: float, lately: deque[float]) -> bool:
    return len(lately) == LATELY and loss <= TARGET


def written(alone: Found, found: Mapping[Technique, Found], processes: int) -> str:
    waiting = found[WAYS[0]].seconds
    lines = [
        "# Time to a loss beside a slow worker",
        "",
        f"Written by `python benchmarks/stragglers/run.py`: a byte-level transformer of 0.4 M weights on Python's source, AdamW with a "
        f"rate of {FLAGS['rate']} (the best of four for DataParallel), batches of 24, until the mean loss of {LATELY} steps is {TARGET}. "
        f"{processes} processes of one thread. All pause, so that what they compute takes {FLAGS['stretch']:g} times its processor's time, "
        f"as on machines of their own, and the last takes {FLAGS['times']:g} times as long as the others. One run each. "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}.",
        "",
        "| way | time to the loss | against waiting | steps | staleness, mean and most | of the gradients, the slow worker's | dropped |",
        "|---|---|---|---|---|---|---|",
        row("DataParallel, nobody slowed", alone, waiting, processes),
        *(row(text(way), one, waiting, processes) for way, one in found.items()),
    ]
    return "\n".join([*lines, "", *verdicts(found, waiting)]) + "\n"


def row(name: str, one: Found, waiting: float | None, processes: int) -> str:
    time = seconds_text(one.seconds) if one.seconds else f"not in {LONGEST:.0f} s: {one.loss:.2f}"
    ratio = f"{waiting / one.seconds:.2f} x" if waiting and one.seconds else ""
    ages = {int(age): count for age, count in one.state.get("staleness", {}).items()}
    total, dropped = sum(ages.values()), one.state.get("dropped", {})
    age = f"{sum(age * count for age, count in ages.items()) / total:.1f}, {max(ages)}" if total else ""
    slow = f"{one.state['applied'].get(str(processes - 1), 0) / total:.0%}" if total else ""
    lost = ", ".join(f"{count} of worker {rank}" for rank, count in dropped.items())
    return f"| {name} | {time} | {ratio} | {one.steps} | {age} | {slow} | {lost} |"


def verdicts(found: Mapping[Technique, Found], waiting: float | None) -> list[str]:
    times = {way: one.seconds for way, one in found.items() if isinstance(way, Asynchronous)}
    reached = {way: seconds for way, seconds in times.items() if seconds}
    if waiting is None or not reached:
        return ["The target was not reached: nothing can be said."]
    best = min(reached, key=lambda way: reached[way])
    ratio = waiting / reached[best]
    said = [
        f"Asked: not waiting is at least {ASKED} times as fast. The best, {text(best)}, is {ratio:.2f} times as fast: "
        f"{'it is' if ratio >= ASKED else 'it is not'}."
    ]
    for kind in ("server", "hogwild"):
        on, off = times[Asynchronous(kind)], times[Asynchronous(kind, correct=False)]
        if on and off:
            verdict = "showed a benefit" if on < off else "showed none"
            said.append(
                f"The correction for staleness {verdict} in {kind}: {seconds_text(on)} with it, {seconds_text(off)} without."
            )
        else:
            said.append(
                f"In {kind} the loss was {'reached' if on else 'not reached'} with the correction for staleness and "
                f"{'reached' if off else 'not reached'} without."
            )
    return said


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
