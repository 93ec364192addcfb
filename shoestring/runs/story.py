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
    plain, techniques, blocks, runners_up, exactness, sure    of the plan (missing while it plans)
    weights_sha256, shown, state_of_techniques     at the end
    damage                what of the folder can't be used, and why; also among the events, as warnings
    checkpoints           [{step, bytes, seconds, time}] as they were saved
    events                all that happened beside steps, in order
    begun, last, now      seconds since 1970: the first event, the last one, this moment
"""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shoestring.core.units import seconds_text
from shoestring.planning.quantities import told_of
from shoestring.runs.events import NAME
from shoestring.runs.fold import ENDS, Fold
from shoestring.runs.folder import Folder, Unusable, holder
from shoestring.runs.measured import measured


def story(path: Path, fold: Fold | None = None) -> dict[str, Any]:
    """The story of the run in a folder; `fold` if its events were read already. What is damaged is left out and told of."""
    (asked, plan, report), damage = read_files(Folder(path), "run.json", "plan.json", "report.json")
    fold = fold or Fold().read(path)
    steps, last = fold.steps, fold.stand
    pid = holder(path)
    alive = "training" if last["event"] == "begun" else "planning"
    state = ENDS.get(last["event"], alive if pid is not None else "died")
    step = steps.number[-1] if steps else 0
    text = str(last.get("text", ""))
    if state == "died":
        stood = f"It stood at step {step} of {fold.wanted}" if fold.wanted else "It was still planning"
        text = (f"The process is gone and said nothing: it was killed, or the machine went down. {stood}"
                + (f" and can go on from step {fold.saved[-1]['step']} by the same command." if fold.saved
                   else "; no checkpoint was saved yet."))
    if state == "training" and steps and fold.last is not None:
        text = silence(time.time() - fold.last, list(steps.seconds[-20:]), pid)
    damage += [fold.wrong] * bool(fold.wrong) + lost(fold.damaged + (pid is None and fold.rest > 0))
    told = {
        "name": path.name, "run": str(path), "job": Path(asked.get("job", "")).stem, "flags": asked.get("flags", {}),
        "budget": {"memory": asked.get("memory")}, "state": state, "pid": pid, "text": text, "step": step, "steps": fold.wanted,
        "losses": list(steps.loss), "seconds": list(steps.seconds),
        "samples_process": [(when - (fold.begun or 0.0), size) for when, size in zip(steps.time, steps.process, strict=True)],
        "checkpoints": list(fold.saved), "damage": damage,
        "events": fold.others + [{"event": "warning", "time": fold.last, "text": one} for one in damage],
        "begun": fold.begun, "last": fold.last, "now": time.time(),
    }
    return told | ({"measured": measured(fold)} if fold.steps else {}) | told_of(plan) | (report if state == "finished" else {})


def read_files(folder: Folder, *names: str) -> tuple[list[dict[str, Any]], list[str]]:
    """JSON files of a run, empty where they can't be used, and why they can't."""
    found, wrong = [], []
    for name in names:
        try:
            found.append(folder.read(name))
        except Unusable as error:
            found.append({})
            wrong.append(str(error))
    return found, wrong


def lost(lines: int) -> list[str]:
    """What to say of damaged lines."""
    if not lines:
        return []
    many = f"{lines:,} lines of {NAME} are" if lines > 1 else f"1 line of {NAME} is"
    return [f"{many} damaged and left out: what happened then is missing here; the weights do not depend on it"]


def silence(seconds: float, paces: list[float], pid: int | None) -> str:
    """What to say of a run that goes on and has said nothing for so long; nothing if that is usual."""
    if seconds < max(30.0, 10 * max(paces[-20:])):
        return ""
    return f"No step for {seconds_text(seconds)}, though its process {pid} is there: it may hang, be suspended, or wait for its data."

