"""The worker: one task in a process of its own. It reads the task from standard input and writes events to a pipe."""
from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.core.errors import Mistake
from shoestring.data.feed import Feed

if TYPE_CHECKING:
    from shoestring.core.link import Link
    from shoestring.core.run import Run
    from shoestring.measure.tracker import Log
    from shoestring.runs.keeper import Keeper

SHOWN = 1 << 28   # bytes of weights on disk: of more, nothing is shown

Send = Callable[[dict[str, Any]], None]


def job_of(task: dict[str, Any], link: Link | None = None) -> Any:
    """The job of a task; in a group, or as one of a group that is imagined (`place`: rank, world, near)."""
    from dataclasses import replace

    from shoestring.core.link import Link
    from shoestring.core.mesh import on_one_axis
    from shoestring.jobfile import loaded_job

    job = loaded_job(Path(task["file"]), task["flags"])
    return replace(job, mesh=on_one_axis(link or Link(*task.get("place", (0, 1)))), steps=task.get("steps", job.steps))


def fresh_model(job: Any) -> Any:
    """The job's model as plain training would begin with it, and the random state for its first step."""
    import torch

    from shoestring.core import random_state as chance
    from shoestring.runs.initial_weights import valued

    chance.seed(job.seed)
    try:
        model = valued(job.model(), job)
    except (Mistake, MemoryError):
        raise
    except Exception as error:
        raise Mistake(f"the job's model could not be made: {type(error).__name__}: {error}") from error
    chance.seed_worker(job.seed, job.link.rank)
    return model.to("cuda") if torch.cuda.is_available() else model


def anchor(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    from shoestring.planning.evidence.anchor import anchored, why_not_again
    from shoestring.planning.evidence.pieces import QUICK
    from shoestring.planning.plan import techniques_in

    job = job_of(task)
    results = {}
    for key, techniques in task["variants"].items():
        try:
            results[key] = anchored(job, techniques_in(techniques), fresh_model(job), task["memory"])
        except Exception as error:
            if key == "":
                raise
            results[key] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    if not task["memory"]:   # at the end: what it needs must not count as the step's
        slow = results[""]["times"]["step"] > QUICK
        results[""]["pieces"] = pieces(task | {"techniques": task["variants"][""], "small": slow})["found"]
        results[""]["again"] = "" if slow or task["variants"][""] else why_not_again(job, fresh_model(job))
    return results


def pieces(task: dict[str, Any], send: Send | None = None, link: Link | None = None) -> dict[str, Any]:
    """Whether a batch in two pieces is the same as at once."""
    from shoestring.planning.evidence.pieces import tried_in_pieces
    from shoestring.planning.plan import techniques_in

    job = job_of(task)
    return {"found": tried_in_pieces(job, lambda: fresh_model(job), techniques_in(task["techniques"]), task.get("small", False))}


def sample(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    from shoestring.planning.evidence.sample import sampled

    return sampled(job_of(task))


def rehearse(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    """The log of real steps, for a model that fake tensors can't run."""
    from shoestring.planning.evidence.rehearse import tracked
    from shoestring.planning.plan import techniques_in

    job = job_of(task)
    return tracked(job, techniques_in(task["techniques"]), fresh_model(job)).as_json()


def trial(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    """A few real steps, to see how large this process grows; `together`: by all workers of the group, and not as if there were one."""
    return train(task | {"trial": True}, send, link if task["together"] else None)


def train(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    """Train, alone or as a worker of a group; with a run folder in the task, keep it there and go on from what is there."""
    from shoestring.loop import finite, steps
    from shoestring.measure.process import status
    from shoestring.measure.tracker import Tracker, watched
    from shoestring.planning.evidence.rehearse import tracked_steps
    from shoestring.planning.plan import techniques_in
    from shoestring.runs.keeper import Keeper, Meter
    from shoestring.runs.measured import of_group

    job, techniques = job_of(task, link), techniques_in(task["techniques"])
    link = job.link
    imagined = link.world > 1 and link.imagined   # what the others would have sent is missing: bytes count, numbers do not
    keeper = Keeper(task, send, link) if "folder" in task else None
    tracker = Tracker()
    run = made(job, techniques, keeper, tracker)
    feed = Feed(job, run.assignment)
    number = keeper.resume(run, feed) if keeper else 0
    losses: list[float] = []
    events: list[dict[str, Any]] = []   # where no folder keeps them
    meter = Meter(run)
    tensors: dict[str, Any] = {"peak_bytes": 0}
    begun = time.perf_counter()

    def go_on(loss: Any) -> bool:
        """Note a step that is done; gives whether there is to be another."""
        nonlocal begun, number
        number += 1
        losses.append(float(loss) if imagined else finite(float(loss), number))
        taken = time.perf_counter() - begun
        event = {"step": number, "loss": losses[-1], "seconds": taken, "process": status("VmRSS"), "most": status("VmHWM")} | meter.step()
        more = keeper.after(run, feed, event) if keeper else True
        meter.begin()
        if keeper is None:
            events.append({"event": "step", "time": time.time()} | event)
            send(events[-1])
        begun = time.perf_counter()
        return more

    batches = islice(feed, task["steps"] - number) if run.assignment.counts_steps else feed
    going = until_stopped(tracked_steps(watched(run, tracker), islice(batches, 2), tracker), go_on)
    if losses:
        tensors = highest_of(tracker.log, run, len(losses))
        if keeper and not run.assignment.asynchronous:   # there the others tell of theirs at the end
            keeper.tell("measured", **tensors)
    elif not number and run.assignment.counts_steps:
        raise Mistake("the job's data yields no batch: nothing to train on")
    going = going and until_stopped(steps(run, batches), go_on)
    run.assignment.end()
    workers = link.objects(tensors | {"process_bytes": status("VmHWM"), "steps": meter.steps, "sent": meter.sent})
    if keeper and run.assignment.asynchronous and losses:
        keeper.tell("measured", **of_group(workers))
    lost = keeper.end(run, feed) if keeper else ""
    if not going and number < task["steps"]:
        return {"stopped": number}
    if lost:
        return {"unsaved": lost}
    return {"steps": number, "losses": losses, "state": told_state(run), "measured": figures(keeper, events, workers), "world": link.world,
            "workers": workers} | ({} if task.get("trial") else shown(task, job, run))


def figures(keeper: Keeper | None, events: list[dict[str, Any]], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured: of the whole run where a folder has its events, else of these."""
    from shoestring.runs.fold import Fold
    from shoestring.runs.measured import measured, of_group

    fold = Fold()
    if keeper:
        return measured(fold.read(keeper.folder.path))
    for event in (*events, {"event": "measured", "time": time.time()} | of_group(workers)):
        fold.add(event)
    return measured(fold)


def highest_of(log: Log, run: Run, steps: int) -> dict[str, Any]:
    """The highest point of the first steps; where workers wait for each other, that of the one which needs most."""
    from shoestring.core.run import gathered
    from shoestring.measure.timeline import peak

    highest = peak(log)
    return {"peak_bytes": max(gathered(run, highest.bytes)), "flops": sum(log.flops.values()) / steps, "where": str(highest.moment),
            "parts": dict(highest.parts)}


def told_state(run: Any) -> dict[str, Any]:
    """What techniques have to say of their course: their state as far as it is numbers and text."""
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        return all(map(plain, value)) if isinstance(value, (list, tuple)) else value is None or isinstance(value, (int, float, str))

    states = {name: part.state_dict() for name, part in run.state.items() if not part.on_disk}
    return {name: state for name, state in states.items() if state and plain(state)}


def made(job: Any, techniques: Any, keeper: Any, tracker: Any) -> Any:
    """The run that the techniques make of the job."""
    from shoestring.core.training import making
    from shoestring.planning.evidence.rehearse import prepared

    resumed = keeper.look() if keeper else False
    with making(techniques):
        model = fresh_model(job)
        same_weights(model, job.link)
        with tracker:
            return prepared(job, techniques, model, keeper.folder.path if keeper else None, resumed)


def same_weights(model: Any, link: Link) -> None:
    """Refuse to train one model that workers began with different weights."""
    from xxhash import xxh3_64

    from shoestring.runs.tensors import pieces

    if link.world == 1 or link.imagined:
        return
    digest = xxh3_64()
    for value in model.state_dict().values():
        for piece in pieces(value) if hasattr(value, "dtype") else ():
            digest.update(piece)
    found = link.objects(digest.hexdigest())
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        raise Mistake(f"worker {others[0]} of {link.world} made other weights than worker 0, though both began from the job's seed: "
                      f"the model draws from something else (the time, the operating system, its own generator); seed that too")


def until_stopped(losses: Iterable[Any], go_on: Callable[[Any], bool]) -> bool:
    """Whether all steps were done. The loss of a step lives until the next is done, as in any loop."""
    from shoestring.core.link import GroupDone

    with suppress(GroupDone):   # the first worker has counted them
        for loss in losses:   # a generator would let go of the loss earlier, and the peak would be lower than planned
            if not go_on(loss):
                return False
    return True


def shown(task: dict[str, Any], job: Any, run: Any) -> dict[str, Any]:
    """What a trained model has to show."""
    import torch

    from shoestring.core.run import kept, weights
    from shoestring.core.units import bytes_text
    from shoestring.runs.digest import weights_sha256
    from shoestring.runs.tensors import write_tensors

    found = {name: value for name, value in weights(run).items() if hasattr(value, "dtype")}
    if run.link.rank and not kept(run):   # the first worker has the same weights and tells of them
        return {}
    result = {"weights_sha256": weights_sha256(found)}
    absent = sum(prod(one.shape) * one.dtype.itemsize for one in kept(run).values())
    if job.show is not None and absent > SHOWN:
        result["shown"] = (f"(the job's show is left out: {bytes_text(absent)} of weights are on disk and would be read for every call "
                           f"of the model; shoestring export gives them as a file)")
    elif job.show is not None:
        run.model.eval()
        with torch.no_grad(), run.usable():
            result["shown"] = job.show(run.model) if run.link.rank == 0 else ""
    if task.get("weights"):
        write_tensors(Path(task["weights"]), found)
    return result


def cable(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    from shoestring.parallel.link_speed import link_speed

    return {"cable": link_speed(task["rank"], task["world"], task["near"], task["store"])}


def doctor(task: dict[str, Any], send: Send, link: Link | None = None) -> dict[str, Any]:
    from dataclasses import asdict

    from shoestring.measure.probe import measured_hardware

    return asdict(measured_hardware(dtypes=True))


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "anchor": anchor, "pieces": pieces, "sample": sample, "rehearse": rehearse, "trial": trial, "train": train, "doctor": doctor,
    "cable": cable,
}


def main() -> None:
    pipe = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    turn = threading.Lock()

    def send(event: dict[str, Any]) -> None:
        with turn:
            pipe.write(json.dumps(event) + "\n")

    task = json.loads(sys.stdin.read())
    last = last_word(task, lambda: TASKS[task["task"]](task, send))
    sys.stderr.write(last.pop("trace", ""))
    if "folder" in task and last["event"] != "result":
        failed(task["folder"], last["text"])
    with suppress(BrokenPipeError):
        send(last)


def last_word(task: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a worker has to say in the end: its result, or what went wrong."""
    try:
        return {"event": "result"} | work()
    except Exception as error:
        last = ending(error, task)
        shown = task.get("traceback") or last["event"] == "fault"
        return last | ({"trace": traceback.format_exc()} if shown else {})


def ending(error: Exception, task: dict[str, Any]) -> dict[str, Any]:
    """What an error means to whoever gave the task."""
    from shoestring.core.blame import blame
    from shoestring.runs.keeper import out_of_memory

    if isinstance(error, Mistake):
        return {"event": "mistake", "text": str(error)}
    if out_of_memory(error):
        return {"event": "out of memory", "text": f"memory ran out: {str(error).strip().splitlines()[0] if str(error) else 'no more'}"}
    found = blame(traceback.extract_tb(error.__traceback__))
    if not found.ours:
        return {"event": "mistake", "text": told(error, found.place)}
    if isinstance(error, OSError):   # what the machine refuses us is nobody's fault
        return {"event": "mistake", "text": f"{sentence(error)} ({found.place})"}
    broken = "a promise of shoestring's own code was broken" if isinstance(error, AssertionError) else "a fault of shoestring"
    used = " + ".join(one["name"] for one in task.get("techniques", ()))
    without = f"; training may work without {used}: name others with --use" if used else ""
    return {"event": "fault", "text": f"{broken} in {found.place}: {sentence(error)}; please report it with the lines above{without}"}


def failed(folder: str, text: str) -> None:
    """Write into a run why it can't go on."""
    from shoestring.runs.events import note

    with suppress(OSError):
        note(Path(folder), "failed", text=text)


def told(error: Exception, place: str) -> str:
    """An error of the user's model or data in a sentence, with the line it came from."""
    first, hint = sentence(error), ""
    if "device" in first and ("Expected all tensors" in first or "meta" in first):
        hint = "; the model and its batch must be on one device: leave both on the CPU and shoestring moves them"
    return f"the job failed in {place}: {first}{hint}; add --traceback to see more"


def sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


if __name__ == "__main__":
    main()
