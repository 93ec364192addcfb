"""The story of a run, as one plain dict: what its page shows, live and as the report at the end.

    name, run             of the folder
    job, flags, budget    what was asked for; budget has `memory`
    state                 planning, training, stopped, finished, failed (it said why) or died (it said nothing)
    pid                   who trains there now, or None
    text                  why it failed, stopped or died, and where it stands
    step, steps           where it is, and where it wants to be
    losses, seconds       of the steps that count, from the first
    samples_process       [seconds since it was begun, bytes of the process]
    predicted, measured   peak_bytes, process_bytes, step_seconds; measured so far while it trains
    plain, techniques, blocks, runners_up, exact, sure    of the plan (missing while it plans)
    weights_sha256, shown, state_of_techniques     at the end
    checkpoints           [{step, bytes, seconds, time}] as they were saved
    events                all that happened beside steps, in order
    begun, last, now      seconds since 1970: the first event, the last one, this moment
"""
from __future__ import annotations

import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from shoestring.core.units import seconds_text
from shoestring.runs.events import course, read
from shoestring.runs.folder import Folder, holder

ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


def story(path: Path, events: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The story of the run in a folder; `events` if they were read already."""
    folder = Folder(path)
    asked, plan, report = folder.read("run.json"), folder.read("plan.json"), folder.read("report.json")
    found = read(path)[0] if events is None else events
    steps = course(found)
    pid = holder(path)
    last = next((event for event in reversed(found) if event["event"] in (*ENDS, "begun", "planning")), {"event": "planning"})
    alive = "training" if last["event"] == "begun" else "planning"
    state = ENDS.get(last["event"], alive if pid is not None else "died")
    step = steps[-1]["step"] if steps else 0
    saved = [event for event in found if event["event"] == "saved"]
    whole = next((event["steps"] for event in reversed(found) if event["event"] == "begun"), 0)
    text = str(last.get("text", ""))
    if state == "died":
        stood = f"It stood at step {step} of {whole}" if whole else "It was still planning"
        text = (f"The process is gone and said nothing: it was killed, or the machine went down. {stood}"
                + (f" and can go on from step {saved[-1]['step']} by the same command." if saved else "; no checkpoint was saved yet."))
    if state == "training" and steps:
        text = silence(time.time() - found[-1]["time"], [event["seconds"] for event in steps], pid)
    begun = found[0]["time"] if found else None
    told = {
        "name": path.name, "run": str(path), "job": Path(asked.get("job", "")).stem, "flags": asked.get("flags", {}),
        "budget": {"memory": asked.get("memory")}, "state": state, "pid": pid, "text": text, "step": step, "steps": whole,
        "losses": [event["loss"] for event in steps], "seconds": [event["seconds"] for event in steps],
        "samples_process": [[event["time"] - begun, event["process"]] for event in steps],
        "checkpoints": saved, "events": [event for event in found if event["event"] not in ("step", "measured")],
        "begun": begun, "last": found[-1]["time"] if found else None, "now": time.time(),
    }
    planned = {key: value for key, value in plan.items() if key in PLANNED}
    return told | so_far(steps, found) | planned | (report if state == "finished" else {})


def silence(seconds: float, paces: list[float], pid: int | None) -> str:
    """What to say of a run that goes on and has said nothing for so long; nothing if that is usual."""
    if seconds < max(30.0, 10 * max(paces[-20:])):
        return ""
    return f"No step for {seconds_text(seconds)}, though its process {pid} is there: it may hang, be suspended, or wait for its data."


PLANNED = ("predicted", "plain", "techniques", "blocks", "runners_up", "exact", "sure")


def so_far(steps: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, Any]:
    """What is measured while a run goes on."""
    if not steps:
        return {}
    recent = events[max((number for number, event in enumerate(events) if event["event"] == "adopted"), default=0):]
    if any(event is steps[-1] for event in recent):   # what was before was another plan
        events, steps = recent, course(recent)
    lives = [event for event in events if event["event"] == "measured"]   # each begins at another step; the first makes moments
    tensors: dict[str, Any] = max(lives, key=lambda event: int(event["peak_bytes"]), default={})
    return {"measured": {key: value for key, value in tensors.items() if key not in ("event", "time")}
            | {"process_bytes": max(event["most"] for event in steps), "step_seconds": calm_seconds(steps, events)}
            | ({"traffic_bytes": steps[-1]["moved"]} if "moved" in steps[-1] else {})
            | ({"sent_bytes": mean(event.get("sent", 0) for event in steps)} if "sent" in steps[-1] else {})}


def calm_seconds(steps: list[dict[str, Any]], events: list[dict[str, Any]]) -> float:
    """Seconds of a step, without the first ones of every life, which make what later ones find, as far as there are others."""
    age, ages = 0, dict[int, int]()
    for event in events:
        age = 0 if event["event"] == "begun" else age + (event["event"] == "step")
        ages[id(event)] = age
    found = ([event["seconds"] for event in steps if ages[id(event)] > young] for young in (2, 1, 0))
    seconds: float = median(next(filter(None, found)))
    return seconds
