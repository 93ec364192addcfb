"""The worker: one task in a process of its own. It reads the task from standard input and writes events to a pipe."""
from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake

Send = Callable[[dict[str, Any]], None]


def job_of(task: dict[str, Any]) -> Any:
    from shoestring.jobfile import loaded_job

    return loaded_job(Path(task["file"]), task["flags"])


def fresh_model(job: Any) -> Any:
    """The job's model as plain training would begin with it, and the random state for its first step."""
    import torch

    torch.manual_seed(job.seed)
    try:
        model = job.model()
    except (Mistake, MemoryError):
        raise
    except Exception as error:
        raise Mistake(f"the job's model could not be made: {type(error).__name__}: {error}") from error
    torch.manual_seed(job.seed)
    return model.to("cuda") if torch.cuda.is_available() else model


def anchor(task: dict[str, Any], send: Send) -> dict[str, Any]:
    from shoestring.planning.anchor import anchored
    from shoestring.planning.plan import techniques_in

    job = job_of(task)
    results = {}
    for key, techniques in task["variants"].items():
        try:
            results[key] = anchored(job, techniques_in(techniques), fresh_model(job), task["memory"])
        except RuntimeError as error:
            if key == "":
                raise
            results[key] = {"error": str(error).splitlines()[0]}
    return results


def rehearse(task: dict[str, Any], send: Send) -> dict[str, Any]:
    """The log of real steps, for a model that fake tensors can't run."""
    from shoestring.planning.plan import techniques_in
    from shoestring.planning.rehearse import tracked

    job = job_of(task)
    return tracked(job, techniques_in(task["techniques"]), fresh_model(job)).as_json()


def trial(task: dict[str, Any], send: Send) -> dict[str, Any]:
    """A few real steps, to see how large this process grows."""
    return train(task | {"trial": True}, send)


def train(task: dict[str, Any], send: Send) -> dict[str, Any]:
    import torch

    from shoestring.loop import finite, steps
    from shoestring.measure.process import status
    from shoestring.measure.timeline import peak
    from shoestring.measure.tracker import Tracker, watched
    from shoestring.planning.plan import techniques_in
    from shoestring.planning.rehearse import prepared, tracked_steps
    from shoestring.state import weights_sha256

    job = job_of(task)
    model = fresh_model(job)
    tracker = Tracker()
    with tracker:
        run = prepared(job, techniques_in(task["techniques"]), model)
    losses: list[float] = []
    seconds: list[float] = []
    feed = islice(job.batches(), task["steps"])
    begun = time.perf_counter()

    def one(loss: Any) -> None:
        nonlocal begun
        value = finite(float(loss), len(losses) + 1)
        losses.append(value)
        now = time.perf_counter()
        seconds.append(now - begun)
        begun = now
        send({"event": "step", "step": len(losses), "loss": value, "seconds": seconds[-1], "process": status("VmRSS"),
              "most": status("VmHWM")})

    for loss in tracked_steps(watched(run, tracker), islice(feed, 2), tracker):
        one(loss)
    log = tracker.log
    for loss in steps(run, feed):
        one(loss)
    if not losses:
        raise Mistake("the job's data yields no batch: nothing to train on")
    highest = peak(log)
    calm = sorted(seconds[2:] or seconds)
    result: dict[str, Any] = {
        "steps": len(losses), "losses": losses,
        "measured": {"peak_bytes": highest.bytes, "process_bytes": status("VmHWM"), "step_seconds": calm[len(calm) // 2],
                     "flops": sum(log.flops.values()) / min(len(losses), 2),
                     "where": str(highest.moment), "parts": dict(highest.parts)},
        "state": {name: part.state_dict() for name, part in run.state.items()},
    }
    if not task.get("trial"):
        result["weights_sha256"] = weights_sha256(model)
        if job.show is not None:
            model.eval()
            with torch.no_grad():
                result["shown"] = job.show(model)
        if task.get("weights"):
            torch.save(model.state_dict(), task["weights"])
    return result


def doctor(task: dict[str, Any], send: Send) -> dict[str, Any]:
    from dataclasses import asdict

    from shoestring.measure.probe import measured_hardware

    return asdict(measured_hardware(dtypes=True))


TASKS: dict[str, Callable[[dict[str, Any], Send], dict[str, Any]]] = {
    "anchor": anchor, "rehearse": rehearse, "trial": trial, "train": train, "doctor": doctor,
}


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "w", buffering=1)

    def send(event: dict[str, Any]) -> None:
        pipe.write(json.dumps(event) + "\n")

    task = json.loads(sys.stdin.read())
    try:
        send({"event": "result"} | TASKS[task["task"]](task, send))
    except Mistake as error:
        if task.get("traceback"):
            traceback.print_exc()
        send({"event": "mistake", "text": str(error)})
    except AssertionError as error:
        traceback.print_exc()
        send({"event": "fault", "text": f"a promise of shoestring's own code was broken: {error}"})
    except Exception as error:
        if task.get("traceback"):
            traceback.print_exc()
        send({"event": "mistake", "text": told(error)})


def told(error: Exception) -> str:
    """An error of the user's model or data in a sentence, with the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.abspath(__file__))
    theirs = [frame for frame in frames if not frame.filename.startswith(ours) or os.sep + "jobs" + os.sep in frame.filename]
    own = [frame for frame in theirs if "site-packages" not in frame.filename] or theirs or list(frames)
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    hint = ""
    if "device" in first and ("Expected all tensors" in first or "meta" in first):
        hint = "; the model and its batch must be on one device: leave both on the CPU and shoestring moves them"
    return (f"the job failed in {Path(own[-1].filename).name} line {own[-1].lineno}: {type(error).__name__}: {first}{hint}; "
            f"add --traceback to see more")


if __name__ == "__main__":
    main()
