"""Run folders made by hand, as a training process would have left them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from math import cos, exp, pi
from pathlib import Path
from typing import Any

from shoestring.runs.events.event import KINDS, Stepped
from shoestring.runs.events.event_log import NAME, Events, kinds_of_rooms, line_of
from shoestring.runs.folder import Folder, Lock

MIB = 1 << 20
LAYERS = range(8)
PLAN: dict[str, Any] = {
    "shoestring": 3,
    "plain": {"peak_bytes": 890 * MIB, "process_bytes": 1229 * MIB, "step_seconds": 0.66},
    "chosen": {
        "techniques": [
            {"name": "Checkpoint", "knobs": {"every": 2}, "why": "activations are computed again instead of kept"},
            {"name": "Accumulate", "knobs": {"pieces": 2}, "why": "half the batch at a time, one update"},
        ],
        "exactness": "to rounding",
        "peak_bytes": 226 * MIB,
        "process_bytes": 548 * MIB,
        "step_seconds": 0.84,
        "basis": "one anchor step was measured, the rest is counted from its tensors",
        "warnings": [],
        "details": {
            "blocks": [
                *([f"forward layers.{layer}", (90 + 14 * layer) * MIB] for layer in LAYERS),
                *([f"backward layers.{layer}", (130 + 13 * layer) * MIB] for layer in reversed(LAYERS)),
                ["update", 128 * MIB],
            ]
        },
    },
    "runners_up": [
        {"text": "Accumulate(pieces=4)", "process_bytes": 571 * MIB, "step_seconds": 1.02, "lost": "12% slower"},
        {
            "text": "Checkpoint(every=1) + Accumulate(pieces=2)",
            "process_bytes": 498 * MIB,
            "step_seconds": 0.97,
            "lost": "7% slower, and the memory it saves isn't needed",
        },
    ],
}


def step_fields(step: int, per_epoch: int = 0) -> dict[str, Any]:
    """What a step says: a loss that falls, a memory that settles below the budget; with epochs, a schedule and a norm too."""
    loss = 2.3 + 3.2 * exp(-step / 60) + 0.05 * (step * 7 % 5)
    told = {
        "step": step,
        "loss": loss,
        "seconds": 0.82 + 0.03 * (step * 5 % 7),
        "process": (531 - 9 * (step % 2)) * MIB,
        "most": 531 * MIB,
    }
    if not per_epoch:
        return told
    rate = 3e-4 * min(step / 40, 0.5 * (1 + cos(pi * min(step / 400, 1))))
    return told | {
        "epoch": step // per_epoch,
        "rate": rate,
        "norm": 0.4 + 2 * exp(-step / 80) + 0.3 * (step * 11 % 7) / 7,
    }


def metrics_at(step: int) -> dict[str, float]:
    """What a validation finds: better until step 300, then worse."""
    loss = 2.4 + 3.1 * exp(-step / 70) + 0.0012 * max(0, step - 300)
    return {"loss": loss, "accuracy": 0.93 - 0.7 * exp(-step / 90) - 0.0002 * max(0, step - 300)}


def made_run(
    path: Path,
    job: str = "gpt",
    begin: bool = True,
    steps: int = 400,
    done: int = 0,
    every: int = 50,
    per_epoch: int = 0,
    flags: dict[str, Any] | None = None,
    loss: Callable[[int], float] | None = None,
) -> Path:
    """The folder of a run that planned, began, and did `done` steps with a checkpoint `every` so many, of which the last two are kept;
    with epochs it validates after each."""
    path.mkdir(parents=True)
    folder = Folder(path)
    folder.write(
        "run.json",
        {
            "job": f"jobs/{job}.py",
            "flags": flags or {"width": 320, "layers": 8, "batch": 16},
            "memory": 600 * MIB,
            "room": "training",
        },
    )
    begun = moments_ago(0.9 * done + 6)
    events: list[dict[str, Any]] = [{"event": "planning", "time": begun, "memory": 600 * MIB}]
    if begin:
        folder.write("plan.json", PLAN)
        events += [
            {
                "event": "begun",
                "time": begun + 5,
                "pid": 1,
                "steps": steps,
                "step": 0,
                "how": "Data from the job's own stream",
            }
        ]
    for step in range(1, done + 1):
        when = begun + 5 + 0.9 * step
        events.append(
            {"event": "step", "time": when, **step_fields(step, per_epoch)} | ({"loss": loss(step)} if loss else {})
        )
        best = step == min(300, done // per_epoch * per_epoch) if per_epoch else False
        if per_epoch and step % per_epoch == 0:
            events.append(
                {
                    "event": "validated",
                    "time": when,
                    "step": step,
                    "epoch": step // per_epoch,
                    "metrics": metrics_at(step),
                    "seconds": 1.1,
                    "best": step <= 300,
                }
            )
        if step % every == 0:
            events.append(
                {
                    "event": "saved",
                    "time": when,
                    "step": step,
                    "checkpoint": f"step-{step:08d}",
                    "seconds": 0.21,
                    "bytes": 104 * MIB,
                    "best": best,
                }
            )
            if step > done - 2 * every or best:
                (folder.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    append(path, events)
    return path


def append(path: Path, events: Iterable[dict[str, Any]]) -> None:
    with open(path / NAME, "ab") as file:
        file.writelines(line_of(event) + b"\n" for event in events)


def add(path: Path, kind: str, **fields: Any) -> None:
    """One event more, as the run itself would add it."""
    events = Events(path)
    events.add((KINDS | kinds_of_rooms())[kind](**fields))
    events.close()


def moments_ago(seconds: float) -> float:
    """A time that an event may bear: pages say how long ago the last one was."""
    return time.time() - seconds


def live_on(path: Path, step: int) -> None:
    """Hold the lock, do one step more, and live until killed."""
    lock = Lock(path)
    Events(path).add(Stepped(**step_fields(step + 1)))
    print(step + 1, flush=True)
    while lock:
        signal.pause()


if __name__ == "__main__":
    live_on(Path(sys.argv[1]), int(sys.argv[2]))
