"""shoestring train: run a plan in a folder, go on with it after whatever ended it, and show predicted beside measured."""
from __future__ import annotations

import re
import sys

from shoestring.commands import DONE, STOPPED
from shoestring.commands.job_flags import asked, job_flags, loaded, team, team_flags
from shoestring.commands.output import say, screen
from shoestring.commands.report import report_of, reported, unfinished
from shoestring.commands.run_plan import after_memory_ran_out, require_means, settled_plan
from shoestring.core.errors import Mistake, OverBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.planning.plan import Plan
    from shoestring.processes.group.rendezvous import Meeting
    from shoestring.processes.nodes import Team
    from shoestring.runs.folder import Folder
    from shoestring.runs.resume import Opened

name = "train"
help = "run that plan and show predicted beside measured"


def flags(parser: ArgumentParser) -> None:
    job_flags(parser)
    team_flags(parser)
    parser.add_argument("--run", metavar="DIR", help="folder of the run; one that is there is resumed (default: runs/JOB-TIME)")
    parser.add_argument("--fresh", action="store_true", help="begin anew in --run; what is there is kept aside")
    parser.add_argument("--adopt", action="store_true", help="go on with what is in --run although the job or plan changed")
    parser.add_argument("--replan", action="store_true", help="go on in --run with a plan made from what was measured there")
    parser.add_argument("--save-every", metavar="N", default="1m",
                        help="save every so many steps (50) or so often (90s, 5m, 1h) (default 1m, and at most 3 %% of the time)")
    parser.add_argument("--keep", type=int, default=3, metavar="K", help="checkpoints to keep, beside the best one (default 3)")
    parser.add_argument("--tensorboard", action="store_true", help="write event files for TensorBoard into the run")
    parser.add_argument("--report", metavar="FILE", help="where to write the report page as well")


def run(options: Namespace) -> int:
    given = asked(options)
    if (options.fresh or options.adopt or options.replan) and not options.run:
        raise Mistake("--fresh, --adopt and --replan are about a run that is there: name it with --run")
    if options.fresh and (options.adopt or options.replan):
        raise Mistake("--fresh begins anew, --adopt and --replan go on: give one of them")
    cadence, workers = cadence_of(options), team(options)
    from pathlib import Path

    from shoestring.runs.folder import asked_for
    from shoestring.runs.resume import new_folder, opened
    from shoestring.runs.tensorboard import needs_tensorboard

    if options.tensorboard:
        needs_tensorboard()
    wanted = asked_for(given.path, given.flags, given.memory, options.use, options.inexact, options.plan, options.exact)
    if workers.nodes is not None and workers.nodes.rank:
        return followed(options, given.path, wanted, workers)
    with meeting_of(workers) as meeting:
        held = opened(Path(options.run) if options.run else new_folder(given.path.stem), wanted, given.path, options.fresh, options.adopt)
        try:
            report = {} if held.changed else kept_report(held.folder)
            if report and not options.replan:
                say(options, f"{held.folder.path} is finished; --fresh trains it anew")
                return reported(options, report, held.folder.path)
            return noted(options, given.path, held, cadence, workers, meeting)
        finally:
            held.lock.release()


def cadence_of(options: Namespace) -> dict[str, Any]:
    """How often to save, from what the user wrote."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", options.save_every.strip())
    if found is None or not float(found[1]) or (not found[2] and not found[1].isdigit()):
        raise Mistake(f"--save-every {options.save_every}: write a number of steps (50) or a time (90s, 5m, 1h)")
    if options.keep < 1:
        raise Mistake(f"--keep {options.keep}: a run needs at least one checkpoint to go on from")
    if not found[2]:
        return {"steps": int(found[1]), "keep": options.keep}
    return {"seconds": float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]], "keep": options.keep}


def kept_report(folder: Folder) -> dict[str, Any]:
    """The report of a finished run; a damaged one is made again from its events and its last checkpoint."""
    from shoestring.runs.folder import Unusable

    try:
        return folder.read("report.json")
    except Unusable as error:
        print(f"warning: {error}", file=sys.stderr)
        return {}


def noted(options: Namespace, path: Path, held: Opened, cadence: dict[str, Any], workers: Team, meeting: Meeting | None) -> int:
    """Train; what ends it early is noted among the run's events, unless the worker did so."""
    from shoestring.runs.events import note, read

    try:
        return trained(options, path, held, cadence, workers, meeting)
    except (Exception, KeyboardInterrupt) as error:
        said = read(held.folder.path)[0]
        if isinstance(error, KeyboardInterrupt):
            note(held.folder.path, "stopped", text="stopped at once; what was not saved is lost")
        elif not said or said[-1]["event"] != "failed":
            note(held.folder.path, "failed", text=str(error))
        raise


def trained(options: Namespace, path: Path, held: Opened, cadence: dict[str, Any], workers: Team, meeting: Meeting | None) -> int:
    """Train in a folder that this process holds."""
    from shoestring.processes.launch import OutOfMemory
    from shoestring.runs.story import story

    job = loaded(options, path, dict(held.asked["flags"]))
    chosen = settled_plan(options, job, held)
    require_means(chosen, workers, held.folder.path)
    folder, memory = held.folder, held.asked["memory"]
    task = {"task": "train", "file": str(path), "flags": held.asked["flags"], "techniques": chosen.as_json()["techniques"],
            "steps": job.steps, "folder": str(folder.path), "memory": memory, "predicted": chosen.process_bytes, "cadence": cadence,
            "traceback": options.traceback}
    try:
        result = worked(options, task, job, chosen, held, workers, meeting)
    except OutOfMemory as error:
        raise OverBudget(after_memory_ran_out(options, job, held, chosen, str(error)), chosen) from error
    told = story(folder.path)
    if "stopped" in result or "unsaved" in result:
        return unfinished(options, folder.path, told, result)
    report = report_of(options.job, held, chosen, told, result)
    try:
        folder.write("report.json", report)
    except OSError as error:
        print(f"warning: the run is done, but its report can't be written ({error.strerror}): free some space and give the same command",
              file=sys.stderr)
    return reported(options, report, folder.path)


def worked(options: Namespace, task: dict[str, Any], job: Job, chosen: Plan, held: Opened, workers: Team,
           meeting: Meeting | None) -> dict[str, Any]:
    """What the worker, or the group of them, gives back; what happens meanwhile is shown."""
    from shoestring.api import worker_environment
    from shoestring.processes.launch import run_worker
    from shoestring.runs.tensorboard import Board

    board = Board(held.folder.path) if options.tensorboard else None
    show = shower(options, job.steps, held.asked["memory"])

    def on_event(event: dict[str, Any]) -> None:
        if board is not None:
            board.add(event)
        show(event)

    try:
        if workers.world == 1:
            return run_worker(task, worker_environment(chosen.techniques), on_event, held.lock.file, say_stopping)
        return grouped(task, held, workers, meeting, on_event)
    finally:
        if board is not None:
            board.close()


def say_stopping() -> None:
    print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr)


def shower(options: Namespace, steps: int, memory: int | None) -> Callable[[dict[str, Any]], None]:
    """Shows the events of a run to the person in front of the terminal."""
    from shoestring.show.terminal import progress

    def show(event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            step, moves = event["step"], sys.stderr.isatty()   # the line moves; on a pipe, every tenth step has its own
            if not options.json and (moves or step % 10 in (0, 1) or step == steps):
                left = (steps - step) * event["seconds"]
                line = progress(step, steps, event["loss"], event["most"], memory, left, screen(sys.stderr))
                print(line, end="\r" if moves else "\n", file=sys.stderr)
        elif kind == "warning":
            print(f"\nwarning: {event['text']}", file=sys.stderr)
        elif kind in ("died", "re-formed"):
            say(options, event["text"])
        elif kind == "begun" and event["step"]:
            say(options, f"going on after step {event['step']} of {event['steps']}: {event['how']}")

    return show


def meeting_of(workers: Team) -> AbstractContextManager[Meeting | None]:
    """Where other machines come to, if there are some: open before the plan is made, so that they can wait for it."""
    if workers.nodes is None:
        from contextlib import nullcontext

        return nullcontext()
    from shoestring.processes.group.rendezvous import Meeting

    return Meeting(workers.nodes)


def grouped(task: dict[str, Any], held: Opened, workers: Team, meeting: Meeting | None,
            on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train in a group of workers, here and on the machines of a meeting."""
    from shoestring.api import worker_environment
    from shoestring.planning.plan import techniques_in
    from shoestring.processes.group.launch import run_group
    from shoestring.processes.launch import fingerprint

    if meeting is not None:
        there = {"folder": str(held.folder.path.resolve()), "fingerprint": fingerprint(task["file"])}
        meeting.give("task", {"task": task | there, "asked": dict(held.asked)})
    return run_group(task, worker_environment(techniques_in(task["techniques"])), on_event, held.lock.file, workers.devices, meeting,
                     workers.patience, workers.restarts, say_stopping)


def followed(options: Namespace, path: Path, wanted: dict[str, Any], workers: Team) -> int:
    """Train on a machine that does not lead: node 0 plans, keeps the run and tells of it."""
    from pathlib import Path

    from shoestring.api import worker_environment
    from shoestring.planning.plan import techniques_in
    from shoestring.processes.group.launch import run_group
    from shoestring.processes.group.rendezvous import Meeting
    from shoestring.runs.folder import differences

    assert workers.nodes is not None, "a machine that does not lead is one of several"
    with Meeting(workers.nodes) as meeting:
        say(options, f"{workers.nodes}: waiting for node 0 to plan …")
        given = meeting.take("task")
        task, found = given["task"] | {"file": str(path)}, differences(given["asked"], wanted)
        if found:
            raise Mistake(f"{workers.nodes} asks for something else than node 0: {'; '.join(found)}; give the same command everywhere")
        if not Path(task["folder"]).is_dir():
            raise Mistake(f"{workers.nodes} does not see the folder of the run, {task['folder']}: put it where all machines see it, "
                          f"under the same name, and say so with --run")
        say(options, f"{workers.nodes}: training; node 0 tells how it goes")
        result = run_group(task, worker_environment(techniques_in(task["techniques"])), devices=workers.devices, nodes=meeting,
                           patience=workers.patience, restarts=workers.restarts, on_stop=say_stopping)
    return STOPPED if "stopped" in result else DONE
