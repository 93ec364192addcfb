"""The command line: what its commands do. The only place that prints; nothing heavy is imported before it is needed."""
from __future__ import annotations

import os
import sys

from shoestring.commands.arguments import parser
from shoestring.core.errors import Mistake, OverBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.planning.plan import Plan
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.nodes import Team
    from shoestring.processes.tasks import TrainResult, TrainTask
    from shoestring.runs.cadence import Cadence
    from shoestring.runs.event import Event, Stepped
    from shoestring.runs.folder import Folder
    from shoestring.runs.report import Report
    from shoestring.runs.request import Request
    from shoestring.runs.resume import Opened

DONE, MISTAKE, OVER_BUDGET, FAULT, NOT_KEPT, STOPPED = 0, 2, 3, 1, 1, 130


def main(words: list[str] | None = None) -> None:
    raise SystemExit(run(sys.argv[1:] if words is None else words))


def run(words: list[str]) -> int:
    """Do a command; gives its exit code."""
    shown = "--traceback" in words
    try:
        options, rest = parser().parse_known_args(words)
        alone = {"doctor": doctor, "watch": watch, "export": export}
        if options.command in alone:
            if rest:
                raise Mistake(f"{rest[0]!r} is no option of {options.command}; see shoestring {options.command} --help")
            return alone[options.command](options)
        from shoestring.core.units import parse_bytes
        from shoestring.jobfile import job_path, parsed_flags

        file = job_path(options.job)
        flags = parsed_flags(file, rest)
        memory = None if options.memory is None else parse_bytes(options.memory)
        from shoestring.core.exactness import allowed

        allowed(options.exact, options.inexact)
        if options.plan and options.use:
            raise Mistake("--plan and --use say two different things: give one of them")
        if options.use:
            from shoestring.planning.names import check_written

            for written in options.use:
                check_written(written)
        if options.plan and not os.path.exists(options.plan):
            raise Mistake(f"there is no plan file {options.plan}; save one with: "
                          f"shoestring plan JOB --memory 2GiB --save {options.plan}")
        from pathlib import Path

        return {"plan": plan, "train": train, "verify": verify}[options.command](options, Path(file), flags, memory)
    except OverBudget as error:
        return refused(error, "--json" in words)
    except Mistake as error:
        return failed(error, MISTAKE, shown)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED
    except OSError as error:
        return failed(error, MISTAKE, shown)
    except Exception as error:
        return failed(error, FAULT, shown)


def failed(error: Exception, code: int, shown: bool) -> int:
    if shown:
        import traceback

        traceback.print_exception(error)
    kind = "" if code == MISTAKE or type(error).__name__ == "Crashed" else f"{type(error).__name__}: "
    print(f"shoestring: {kind}{error}", file=sys.stderr)
    return code


def refused(error: OverBudget, as_json: bool) -> int:
    nearest: Any = error.nearest
    if as_json:
        import json

        print(json.dumps({"error": str(error), "least_bytes": nearest.process_bytes, "nearest": nearest.as_json()}))
    print(f"shoestring: {error}", file=sys.stderr)
    return OVER_BUDGET


def loaded(options: Namespace, path: Path, flags: dict[str, Any]) -> Job:
    from shoestring.jobfile import loaded_job

    try:
        return loaded_job(path, flags)
    except Mistake as error:
        if options.traceback and error.__cause__ is not None:
            import traceback

            traceback.print_exception(error.__cause__)
        raise


def planned(options: Namespace, job: Job, memory: int | None) -> tuple[Plan, dict[str, Any]]:
    """The plan to run and the planner's outcome as JSON (empty when a saved plan is replayed)."""
    from pathlib import Path

    from shoestring.api import plan as make_plan
    from shoestring.planning.plan import load_plan

    if options.plan:
        return within(load_plan(Path(options.plan)), options.exact), {}
    say(options, "planning …")
    crew = team(options)
    outcome = make_plan(job, memory, options.use, options.inexact, devices=crew.world, here=crew.devices,
                        hardware=getattr(options, "hardware", None), exact=options.exact)
    return outcome.chosen, outcome.as_json()


def within(plan: Plan, exact: str | None) -> Plan:
    """A plan that was saved, if it is as close to plain training as the user asks for."""
    from shoestring.core.exactness import ASKED

    if exact and plan.exactness > ASKED[exact]:
        raise Mistake(f"the plan {plan} is {plan.exactness.word}, and --exact {exact} allows {ASKED[exact].word}: plan anew, or give "
                      f"{plan.exactness.flag}")
    return plan


def say(options: Namespace, text: str) -> None:
    """A word for the person in front of the terminal; never in the way of --json."""
    if sys.stderr.isatty() or not options.json:
        print(text, file=sys.stderr)


def whys() -> dict[str, str]:
    from shoestring.planning.catalogue import CATALOGUE

    return {kind.__name__: str(kind.why) for kind in CATALOGUE}


def plan(options: Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    import json
    from pathlib import Path

    from shoestring.show.terminal import plan_text

    team(options)
    job = loaded(options, path, flags)
    chosen, outcome = planned(options, job, memory)
    if options.save:
        chosen.save(Path(options.save))
    if not outcome:
        outcome = {"chosen": chosen.as_json()}
    if options.json:
        print(json.dumps(outcome))
    elif "plain" in outcome:
        print(plan_text(outcome, whys()))
    else:
        print(chosen)
    return DONE


def train(options: Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    if (options.fresh or options.adopt or options.replan) and not options.run:
        raise Mistake("--fresh, --adopt and --replan are about a run that is there: name it with --run")
    if options.fresh and (options.adopt or options.replan):
        raise Mistake("--fresh begins anew, --adopt and --replan go on: give one of them")
    cadence, crew = cadence_of(options), team(options)
    from pathlib import Path

    from shoestring.runs.event import Failed, Stopped
    from shoestring.runs.events import note, read
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, opened
    from shoestring.runs.tensorboard import needs_tensorboard

    if options.tensorboard:
        needs_tensorboard()
    asked = request_for(path, flags, memory, options.use, options.inexact, options.plan, options.exact)
    if crew.nodes is not None and crew.nodes.rank:
        return followed(options, path, asked, crew)
    with rendezvous_of(crew) as rendezvous:
        held = opened(Path(options.run) if options.run else new_folder(path.stem), asked, path, options.fresh, options.adopt)
        try:
            report = {} if held.changed else kept_report(held.folder)
            if report and not options.replan:
                say(options, f"{held.folder.path} is finished; --fresh trains it anew")
                return reported(options, report, held.folder.path)
            try:
                return trained(options, path, held, cadence, crew, rendezvous)
            except (Exception, KeyboardInterrupt) as error:
                said = read(held.folder.path).events
                if isinstance(error, KeyboardInterrupt):
                    note(held.folder.path, Stopped(text="stopped at once; what was not saved is lost"))
                elif not said or not isinstance(said[-1], Failed):
                    note(held.folder.path, Failed(str(error)))
                raise
        finally:
            held.lock.release()


def kept_report(folder: Folder) -> dict[str, Any]:
    """The report of a finished run; a damaged one is made again from its events and its last checkpoint."""
    from shoestring.runs.folder import Unusable

    try:
        return folder.read("report.json")
    except Unusable as error:
        print(f"warning: {error}", file=sys.stderr)
        return {}


def cadence_of(options: Namespace) -> Cadence:
    """How often to save, from what the user wrote."""
    import re

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", options.save_every.strip())
    if found is None or not float(found[1]) or (not found[2] and not found[1].isdigit()):
        raise Mistake(f"--save-every {options.save_every}: write a number of steps (50) or a time (90s, 5m, 1h)")
    if options.keep < 1:
        raise Mistake(f"--keep {options.keep}: a run needs at least one checkpoint to go on from")
    from shoestring.runs.cadence import Cadence

    if not found[2]:
        return Cadence(steps=int(found[1]), keep=options.keep)
    return Cadence(seconds=float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]], keep=options.keep)


def settled_plan(options: Namespace, job: Job, held: Opened) -> Plan:
    """The plan of a run: the one that is there, the one that follows from what was measured, or a new one."""
    from shoestring.core.units import bytes_text
    from shoestring.planning.outcome import plan_file
    from shoestring.planning.plan import plan_in
    from shoestring.runs.event import Adopted, Planning
    from shoestring.runs.events import note
    from shoestring.show.terminal import plan_text

    file, following = held.folder.path / "plan.json", held.folder.path / "plan-next.json"
    if options.replan:
        if not following.exists():
            raise Mistake(f"{held.folder.path} did not run out of memory, so nothing was measured to plan from: leave --replan out, "
                          f"or give another --memory with --adopt")
        chosen = plan_in(held.folder.read("plan-next.json"), following)
        following.rename(file)
        note(held.folder.path, Adopted(("the plan made from what was measured",)))
        return chosen
    kept = None if held.changed else kept_plan(held.folder, options.adopt)
    if kept is None:
        request, memory = held.request, held.request.memory
        note(held.folder.path, Planning(memory))
        options.use, options.inexact, options.exact = request.use, request.inexact, request.exact
        chosen, outcome = planned(options, job, memory)
        if outcome and memory is not None and chosen.process_bytes > memory:
            raise OverBudget(f"{chosen} needs {bytes_text(chosen.process_bytes)}, more than the {bytes_text(memory)} of --memory", chosen)
        held.folder.write("plan.json", plan_file(chosen, outcome))   # before anything else: who is killed now goes on with this plan
        following.unlink(missing_ok=True)
        if not options.json and outcome:
            print(plan_text(outcome, whys()), "", sep="\n")
        return chosen
    return kept


def kept_plan(folder: Folder, adopt: bool) -> Plan | None:
    """The plan of a run, if it has one. A damaged one is never trained from: with `adopt` another is made."""
    from shoestring.planning.plan import plan_in
    from shoestring.runs.event import Adopted
    from shoestring.runs.events import note
    from shoestring.runs.folder import CURES, Unusable

    try:
        found = folder.read("plan.json")
        return plan_in(found, folder.path / "plan.json") if found else None
    except Mistake as error:
        if adopt:
            note(folder.path, Adopted(("a new plan, because the one it had was damaged",)))
            return None
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"{error}; {CURES['plan.json']}") from error


def team(options: Namespace) -> Team:
    """Who trains together, from what the user wrote, or from what torchrun or SLURM put into the environment."""
    from shoestring.processes.nodes import Team, team_of

    if "devices" not in options:
        return Team()
    return team_of(options.devices, options.nodes, options.patience, options.restarts, os.environ)


def followed(options: Namespace, path: Path, asked: Request, crew: Team) -> int:
    """Train on a machine that does not lead: node 0 plans, keeps the run and tells of it."""
    from dataclasses import replace
    from pathlib import Path

    from shoestring.api import worker_environment
    from shoestring.planning.evidence.tasks import techniques_of
    from shoestring.processes.group.launch import run_group
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.tasks import TrainTask, read_task
    from shoestring.runs.request import differences

    assert crew.nodes is not None, "a machine that does not lead is one of several"
    with Rendezvous(crew.nodes) as rendezvous:
        say(options, f"{crew.nodes}: waiting for node 0 to plan …")
        given = rendezvous.invitation()
        task, found = read_task(given.task), differences(given.request, asked)
        assert isinstance(task, TrainTask) and task.recording is not None, "machines train together, in a folder"
        if found:
            raise Mistake(f"{crew.nodes} asks for something else than node 0: {'; '.join(found)}; give the same command everywhere")
        if not Path(task.recording.folder).is_dir():
            raise Mistake(f"{crew.nodes} does not see the folder of the run, {task.recording.folder}: put it where all machines see it, "
                          f"under the same name, and say so with --run")
        say(options, f"{crew.nodes}: training; node 0 tells how it goes")
        result = run_group(replace(task, file=str(path)), worker_environment(techniques_of(task.techniques)), devices=crew.devices,
                           nodes=rendezvous, patience=crew.patience, restarts=crew.restarts, expected=given.fingerprint)
    return DONE if result.stopped is None else STOPPED


def trained(options: Namespace, path: Path, held: Opened, cadence: Cadence, crew: Team,
            rendezvous: Rendezvous | None) -> int:
    """Train in a folder that this process holds."""
    from shoestring.api import worker_environment
    from shoestring.planning.evidence.tasks import specs_of
    from shoestring.processes.launch import run_worker
    from shoestring.processes.messages import OutOfMemory
    from shoestring.processes.tasks import TrainTask
    from shoestring.runs.event import Begun, Died, Reformed, Stepped, Warned
    from shoestring.runs.recorder import Recording
    from shoestring.runs.report import report_of
    from shoestring.runs.tensorboard import Board

    job = loaded(options, path, dict(held.request.flags))
    chosen = settled_plan(options, job, held)
    require_means(chosen, crew, held.folder.path)
    folder, memory = held.folder, held.request.memory
    board = Board(folder.path) if options.tensorboard else None

    def show(event: Event) -> None:
        if board is not None:
            board.add(event)
        if isinstance(event, Stepped):
            show_step(options, event, job.steps, memory)
        elif isinstance(event, Warned):
            print(f"\nwarning: {event.text}", file=sys.stderr)
        elif isinstance(event, (Died, Reformed)):
            say(options, event.text)
        elif isinstance(event, Begun) and event.step:
            say(options, f"going on after step {event.step} of {event.steps}: {event.how}")

    task = TrainTask(file=str(path), flags=held.request.flags, techniques=specs_of(chosen.techniques), steps=job.steps,
                     recording=Recording(str(folder.path), cadence, memory, chosen.process_bytes), traceback=options.traceback)
    try:
        if crew.world == 1:
            result = run_worker(task, worker_environment(chosen.techniques), show, held.lock.file)
        else:
            result = grouped(task, held, crew, rendezvous, show)
    except OutOfMemory as error:
        raise OverBudget(after_memory_ran_out(options, job, held, chosen, str(error)), chosen) from error
    finally:
        if board is not None:
            board.close()
    told = report_of(folder.path)
    if result.stopped is not None or result.unsaved:
        return unfinished(options, folder.path, told, result)
    plan = plan_file(chosen, {})
    report: dict[str, Any] = {
        "run": str(folder.path), "job": options.job, "flags": dict(held.request.flags), "steps": told.step,
        "losses": list(told.losses),
        "budget": {"memory": memory}, "predicted": plan["predicted"],
        "measured": dict(told.measured), "techniques": plan["techniques"],
        "weights_sha256": result.weights_sha256, "exactness": chosen.exactness.word, "sure": chosen.sure,
        "shown": result.shown, "state_of_techniques": result.state, "world": result.world,
    }
    if result.restarts is not None:
        report |= {"restarts": result.restarts, "recovery_seconds": list(result.recovery_seconds)}
        report["sent_bytes"] = {"predicted": plan["predicted"].get("sent_bytes"), "measured": report["measured"].get("sent_bytes")}
    try:
        folder.write("report.json", report)
    except OSError as error:
        print(f"warning: the run is done, but its report can't be written ({error.strerror}): free some space and give the same command",
              file=sys.stderr)
    return reported(options, report, folder.path)


def unfinished(options: Namespace, run: Path, told: Report, result: TrainResult) -> int:
    """Tell of a run that the same command goes on with."""
    from shoestring.show.page import page

    write_page(run / "report.html", page(told.as_json()))
    if result.unsaved:
        print(f"shoestring: {result.unsaved}", file=sys.stderr)
        return FAULT
    said = told.text if result.stopped else "stopped before it trained a step"
    say(options, f"{said}; the same command goes on from there")
    warn(told.damage)
    return STOPPED


def require_means(chosen: Plan, crew: Team, folder: Path) -> None:
    """Refuse a plan that these workers, or this disk, can't carry out."""
    from shoestring.memory.disk_store import require_room

    if crew.world > 1 and not any(one.unites for one in chosen.techniques):
        raise Mistake(f"{chosen} is a plan for one worker, with nothing that unites {crew.world}: they would train apart; plan for them "
                      f"(--devices without --plan, --fresh in a folder that has a plan), or train with one")
    require_room(folder, chosen.stored_bytes, sum(file.stat().st_blocks * 512 for file in folder.glob("*.bin")))


def rendezvous_of(crew: Team) -> AbstractContextManager[Rendezvous | None]:
    """Where other machines come to, if there are some: open before the plan is made, so that they can wait for it."""
    if crew.nodes is None:
        from contextlib import nullcontext

        return nullcontext()
    from shoestring.processes.group.rendezvous import Rendezvous

    return Rendezvous(crew.nodes)


def grouped(task: TrainTask, held: Opened, crew: Team, rendezvous: Rendezvous | None, show: Any) -> TrainResult:
    """Train in a group of workers, here and on the machines that came to the rendezvous."""
    from dataclasses import replace

    from shoestring.api import worker_environment
    from shoestring.planning.evidence.tasks import techniques_of
    from shoestring.processes.group.launch import run_group
    from shoestring.processes.group.round import Invitation
    from shoestring.processes.launch import fingerprint
    from shoestring.processes.tasks import written_task

    if rendezvous is not None:
        assert task.recording is not None, "the command trains in a folder"
        there = replace(task, recording=replace(task.recording, folder=str(held.folder.path.resolve())))
        rendezvous.invite(Invitation(written_task(there), held.request, fingerprint(task.file)))
    return run_group(task, worker_environment(techniques_of(task.techniques)), show, held.lock.file, crew.devices, rendezvous,
                     crew.patience, crew.restarts)


def warn(damage: Iterable[str]) -> None:
    """Tell of what can't be read in a run's folder."""
    for text in damage:
        print(f"warning: {text}", file=sys.stderr)


def reported(options: Namespace, report: dict[str, Any], run: Path) -> int:
    """Write the page of a run that is finished and tell the user of it."""
    import json
    from pathlib import Path

    from shoestring.runs.report import report_of
    from shoestring.show.page import page

    told = report_of(run)
    warn(told.damage)
    write_page(run / "report.html", page(told.as_json()))
    if options.report:
        write_page(Path(options.report), page(told.as_json()), asked=True)
    if options.json:
        print(json.dumps(report))
    else:
        show_report(report, options.report or run / "report.html")
    return DONE


def write_page(place: Path, text: str, asked: bool = False) -> None:
    """A page that can't be written is told of; the run is none the worse."""
    from shoestring.core.files import write_whole

    try:
        write_whole(place, text.encode(), asked)
    except OSError as error:
        print(f"warning: {place} can't be written: {error.strerror}", file=sys.stderr)


def after_memory_ran_out(options: Namespace, job: Job, held: Opened, chosen: Plan, why: str) -> str:
    """Plan again with what was measured; gives what to tell the user."""
    from shoestring.api import plan as make_plan
    from shoestring.core.units import bytes_text
    from shoestring.measure.process import memory_free
    from shoestring.runs.checkpoints import newest_good
    from shoestring.runs.report import report_of

    told = report_of(held.folder.path)
    good, _ = newest_good(held.folder.checkpoints)
    kept = f"its checkpoint of step {good.step} is whole" if good else "it had no checkpoint yet, so it will begin anew"
    measured = int(told.measured.get("process_bytes", 0))
    most = max(measured, chosen.process_bytes)
    budget = held.request.memory or int(0.9 * memory_free())
    crew = team(options)
    said = f"the run stopped after step {told.step} because {why}; {kept}. It was planned for {bytes_text(chosen.process_bytes)} " \
           f"and had {bytes_text(measured)} at its last step"
    say(options, "planning again with what was measured …")
    try:
        outcome = make_plan(job, int(min(0.9, chosen.process_bytes / most) * min(budget, most)), None, held.request.inexact,
                            devices=crew.world, here=crew.devices, exact=held.request.exact)
    except (Mistake, OverBudget) as error:   # nothing fits, or planning, which trains a few steps, met the same
        return f"{said}; planning again led to nothing: {error}"
    held.folder.write("plan-next.json", outcome.as_file())
    return (f"{said}. A plan with more room is ready, {outcome.chosen} at {bytes_text(outcome.chosen.process_bytes)}: "
            f"go on with it by the same command and --run {held.folder.path} --replan")


def show_step(options: Namespace, event: Stepped, steps: int, memory: int | None) -> None:
    """The line that moves; on a pipe, every tenth step."""
    from shoestring.show.terminal import progress

    if not options.json and (sys.stderr.isatty() or event.step % 10 in (0, 1) or event.step == steps):
        left = (steps - event.step) * event.seconds
        end = "\r" if sys.stderr.isatty() else "\n"
        print(progress(event.step, steps, event.loss, event.most, memory, left), end=end, file=sys.stderr)


def show_report(report: dict[str, Any], place: str | Path) -> None:
    from pathlib import Path

    from shoestring.show.terminal import beside

    print("", beside(report["predicted"], report["measured"]), "", sep="\n")
    if report["shown"]:
        print(report["shown"], "", sep="\n")
    losses = report["losses"]
    course = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {report['steps']} steps; " if losses else ""   # its events may be lost
    print(f"{course}weights {report['weights_sha256'][:12]}")
    print(f"report: {Path(place).resolve()}")


def watch(options: Namespace) -> int:
    from shoestring.show.watch.places import check

    for run in options.run:
        check(run)
    import json
    from pathlib import Path

    from shoestring.show.watch import serve

    def ready(url: str) -> None:
        print(json.dumps({"url": url}) if options.json else f"watching at {url} (Ctrl-C ends)", flush=True)

    serve([Path(run) for run in options.run], options.host, options.port, ready)
    return DONE


def export(options: Namespace) -> int:
    from shoestring.show.watch.places import is_run

    if not is_run(options.run):
        raise Mistake(f"{options.run} is not a run of shoestring: give the folder that `shoestring train` named")
    import json
    from pathlib import Path

    from shoestring.runs.folder import Folder, source_of

    folder = Folder(Path(options.run))
    from shoestring.jobfile import loaded_job
    from shoestring.runs.export import checkpoint_of, export_hugging_face, export_steps, export_weights, newer_weights

    target = Path(options.out) if options.out else folder.path / ("export-hf" if options.to == "hf" else f"export.{options.to}")
    if options.to in ("csv", "json"):
        made, damage = export_steps(folder, options.to, target)
        warn(damage)
        print(json.dumps({"path": str(made)}) if options.json else f"written: {made}")
        return DONE
    checkpoint = checkpoint_of(folder, options.step)
    if options.to == "safetensors":
        made = export_weights(checkpoint, target)
    else:
        made = export_hugging_face(checkpoint, loaded_job(source_of(folder), flags_of(folder)), target)
    more = "" if options.step is not None else newer_weights(folder, checkpoint)
    if more:
        print(f"warning: {more}", file=sys.stderr)
    told = {"path": str(made), "step": checkpoint.step} | ({"warning": more} if more else {})
    print(json.dumps(told) if options.json else f"written: {made}, the weights after step {checkpoint.step}")
    return DONE


def flags_of(folder: Folder) -> dict[str, Any]:
    """The flags that the job of a run was made with."""
    request = folder.request()
    return dict(request.flags) if request is not None else {}


def plan_line(plan: dict[str, Any]) -> str:
    from shoestring.show.terminal import plan_name

    return plan_name(plan)


VERDICTS = {True: "kept", False: "NOT KEPT", None: "not checked"}


def verify(options: Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    if options.check_steps < 1:
        raise Mistake(f"--check-steps {options.check_steps}: compare at least one step")
    import json

    from shoestring.api import ROUNDED, verified
    from shoestring.core.exactness import Exactness
    from shoestring.show.terminal import beside, table

    job = loaded(options, path, flags)
    chosen, _ = planned(options, job, memory)
    say(options, f"training {options.check_steps} steps plainly and with {chosen} …")
    report = verified(job, chosen, options.check_steps)
    code = DONE if report["kept"] else NOT_KEPT
    if options.json:
        print(json.dumps(report))
        return code
    same = Exactness.BITS.word
    rows = [["", "weights", "largest difference", "losses off by", "stated", "verdict"]]
    rows += [[one["technique"], same if one["bit_equal"] else f"not the {same}", f"{one['largest_difference']:.2g}",
              f"{one['loss_difference']:.1g}", one["stated"], VERDICTS[one["kept"]]] for one in report["verdicts"]]
    print(table(rows, right=(2, 3)))
    print(f"\n{Exactness.ROUNDING.word}: losses within {ROUNDED:.2%}; of {Exactness.DRAWS.word} and {Exactness.CHANGED.word}, nothing "
          f"is promised that {options.check_steps} steps could show")
    print("", beside(report["predicted"], report["measured"]), "", sep="\n")
    print("losses, plain and planned:")
    print("\n".join(f"  {plain:.6f}  {planned:.6f}" for plain, planned in report["losses"]))
    return code


def doctor(options: Namespace) -> int:
    import json
    import time
    from dataclasses import asdict
    from importlib.util import find_spec

    from shoestring.core.units import bytes_text

    if find_spec("torch") is None:
        raise Mistake("torch is not installed: pip install torch==2.13.0 (the CPU build), or the build for your GPU")
    from shoestring.measure.probe import QUIET, kept_hardware, remember, settled
    from shoestring.memory.allocator import LIBRARIES, library
    from shoestring.processes.launch import run_worker
    from shoestring.processes.tasks import DoctorTask
    from shoestring.show.terminal import table

    say(options, "measuring this machine …")
    believed = settled(kept_hardware(), run_worker(DoctorTask(), {}))
    remember(believed)
    found = asdict(believed)
    missing = [f"{name}: Debian's lib{name}2 or lib{name}2.0 gives the allocator another choice" for name in LIBRARIES if not library(name)]
    missing += [f"{name}: pip install {package}" for name, package in
                (("transformers", "transformers"), ("sklearn", "scikit-learn")) if find_spec(name) is None]
    if options.json:
        print(json.dumps(found | {"missing": missing}))
        return DONE
    rows = [["what", "found"], ["device", f"{found['device']}: {found['name']}, {found['cores']} threads"],
            ["memory", bytes_text(found["memory"])], ["torch", found["torch"]],
            ["matrix products", f"{found['flops'] / 1e9:.0f} GFLOP/s in float32"],
            ["disk", f"{bytes_text(found['disk'])}/s, written and read back"],
            ["disk, direct", f"{bytes_text(found['direct'])}/s past the page cache" if found["direct"] else "no direct I/O here"],
            ["fresh memory", f"{found['fault'] * 2**30:.2f} s per GiB in small pages, {found['huge_fault'] * 2**30:.2f} in huge ones"]]
    rows += [[f"dtype {name}", what or "works"] for name, what in found["dtypes"].items()]
    again = "; the machine was busy, so it is measured again when it is quieter" if found["busy"] > QUIET else ""
    rows.append(["measured", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found['when']))}, the best of {found['tries']} tries; "
                             f"others had {found['busy']:.0%} of the cores in the quietest{again}"])
    if found["environment"]:
        rows.append(["workers start with", ", ".join(f"{name}={value}" for name, value in found["environment"].items())])
    rows += [["missing", text] for text in missing]
    print(table(rows))
    return DONE
