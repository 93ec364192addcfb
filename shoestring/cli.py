"""The command line: what its commands do. The only place that prints; nothing heavy is imported before it is needed."""
from __future__ import annotations

import os
import sys

from shoestring.arguments import parser
from shoestring.core.errors import Mistake, OverBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.core.nodes import Team
    from shoestring.meeting import Meeting
    from shoestring.planning.plan import Plan
    from shoestring.runs.resume import Opened

DONE, MISTAKE, OVER_BUDGET, FAULT, STOPPED = 0, 2, 3, 1, 130


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
        return load_plan(Path(options.plan)), {}
    say(options, "planning …")
    crew = team(options)
    outcome = make_plan(job, memory, options.use, options.inexact, devices=crew.world, here=crew.devices,
                        hardware=getattr(options, "hardware", None))
    return outcome.chosen, outcome.as_json() | {"blocks": outcome.chosen.blocks}


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

    from shoestring.terminal import plan_text

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

    from shoestring.runs.board import needs_tensorboard
    from shoestring.runs.events import note, read
    from shoestring.runs.folder import asked_for
    from shoestring.runs.resume import new_folder, opened

    if options.tensorboard:
        needs_tensorboard()
    asked = asked_for(path, flags, memory, options.use, options.inexact, options.plan)
    if crew.nodes is not None and crew.nodes.rank:
        return followed(options, path, asked, crew)
    with meeting_of(crew) as meeting:
        held = opened(Path(options.run) if options.run else new_folder(path.stem), asked, path, options.fresh, options.adopt)
        try:
            report = {} if held.changed else held.folder.read("report.json")
            if report and not options.replan:
                say(options, f"{held.folder.path} is finished; --fresh trains it anew")
                return reported(options, report, held.folder.path)
            try:
                return trained(options, path, held, cadence, crew, meeting)
            except (Exception, KeyboardInterrupt) as error:
                said = read(held.folder.path)[0]
                if isinstance(error, KeyboardInterrupt):
                    note(held.folder.path, "stopped", text="stopped at once; what was not saved is lost")
                elif not said or said[-1]["event"] != "failed":
                    note(held.folder.path, "failed", text=str(error))
                raise
        finally:
            held.lock.release()


def cadence_of(options: Namespace) -> dict[str, Any]:
    """How often to save, from what the user wrote."""
    import re

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", options.save_every.strip())
    if found is None or not float(found[1]) or (not found[2] and not found[1].isdigit()):
        raise Mistake(f"--save-every {options.save_every}: write a number of steps (50) or a time (90s, 5m, 1h)")
    if options.keep < 1:
        raise Mistake(f"--keep {options.keep}: a run needs at least one checkpoint to go on from")
    if not found[2]:
        return {"steps": int(found[1]), "keep": options.keep}
    return {"seconds": float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]], "keep": options.keep}


def settled_plan(options: Namespace, job: Job, held: Opened) -> Plan:
    """The plan of a run: the one that is there, the one that follows from what was measured, or a new one."""
    from shoestring.core.units import bytes_text
    from shoestring.planning.plan import load_plan
    from shoestring.runs.events import note
    from shoestring.terminal import plan_text

    file, following = held.folder.path / "plan.json", held.folder.path / "plan-next.json"
    if options.replan:
        if not following.exists():
            raise Mistake(f"{held.folder.path} did not run out of memory, so nothing was measured to plan from: leave --replan out, "
                          f"or give another --memory with --adopt")
        following.rename(file)
        note(held.folder.path, "adopted", differences=["the plan made from what was measured"])
    elif held.changed or not file.exists():
        note(held.folder.path, "planning", memory=held.asked["memory"])
        options.use, options.inexact = held.asked["use"], held.asked["inexact"]
        chosen, outcome = planned(options, job, held.asked["memory"])
        memory = held.asked["memory"]
        if outcome and memory is not None and chosen.process_bytes > memory:
            raise OverBudget(f"{chosen} needs {bytes_text(chosen.process_bytes)}, more than the {bytes_text(memory)} of --memory", chosen)
        if not options.json and outcome:
            print(plan_text(outcome, whys()), "", sep="\n")
        held.folder.write("plan.json", plan_file(chosen, outcome))
        following.unlink(missing_ok=True)
        return chosen
    return load_plan(file)


def plan_file(chosen: Plan, outcome: dict[str, Any]) -> dict[str, Any]:
    """A plan as the run keeps it: replayed by --plan, shown by its page."""
    reasons = whys()
    return {
        "shoestring": 1, "chosen": chosen.as_json(), "plain": outcome.get("plain", {}), "blocks": outcome.get("blocks", ()),
        "predicted": {"peak_bytes": chosen.peak_bytes, "process_bytes": chosen.process_bytes, "step_seconds": chosen.step_seconds,
                      "traffic_bytes": chosen.traffic, "sent_bytes": chosen.sent},
        "techniques": [one | {"why": reasons.get(one["name"], "")} for one in chosen.as_json()["techniques"]],
        "runners_up": [one | {"text": plan_line(one)} for one in outcome.get("runners_up", ())], "exact": chosen.exact, "sure": chosen.sure,
    }


def team(options: Namespace) -> Team:
    """Who trains together, from what the user wrote, or from what torchrun or SLURM put into the environment."""
    from shoestring.core.nodes import Team, team_of

    if "devices" not in options:
        return Team()
    return team_of(options.devices, options.nodes, options.patience, options.restarts, os.environ)


def followed(options: Namespace, path: Path, asked: dict[str, Any], crew: Team) -> int:
    """Train on a machine that does not lead: node 0 plans, keeps the run and tells of it."""
    from pathlib import Path

    from shoestring.api import worker_environment
    from shoestring.group import run_group
    from shoestring.meeting import Meeting
    from shoestring.planning.plan import techniques_in
    from shoestring.runs.folder import differences

    assert crew.nodes is not None, "a machine that does not lead is one of several"
    with Meeting(crew.nodes) as meeting:
        say(options, f"{crew.nodes}: waiting for node 0 to plan …")
        given = meeting.take("task")
        task, found = given["task"] | {"file": str(path)}, differences(given["asked"], asked)
        if found:
            raise Mistake(f"{crew.nodes} asks for something else than node 0: {'; '.join(found)}; give the same command everywhere")
        if not Path(task["folder"]).is_dir():
            raise Mistake(f"{crew.nodes} does not see the folder of the run, {task['folder']}: put it where all machines see it, "
                          f"under the same name, and say so with --run")
        say(options, f"{crew.nodes}: training; node 0 tells how it goes")
        result = run_group(task, worker_environment(techniques_in(task["techniques"])), devices=crew.devices, nodes=meeting,
                           patience=crew.patience, restarts=crew.restarts)
    return STOPPED if "stopped" in result else DONE


def trained(options: Namespace, path: Path, held: Opened, cadence: dict[str, Any], crew: Team,
            meeting: Meeting | None) -> int:
    """Train in a folder that this process holds."""
    from shoestring.api import worker_environment
    from shoestring.launch import OutOfMemory, run_worker
    from shoestring.page import page
    from shoestring.runs.board import Board
    from shoestring.runs.story import story

    job = loaded(options, path, dict(held.asked["flags"]))
    chosen = settled_plan(options, job, held)
    require_means(chosen, crew, held.folder.path)
    folder, memory = held.folder, held.asked["memory"]
    board = Board(folder.path) if options.tensorboard else None

    def show(event: dict[str, Any]) -> None:
        if board is not None:
            board.add(event)
        if event["event"] == "step":
            show_step(options, event, job.steps, memory)
        elif event["event"] == "warning":
            print(f"\nwarning: {event['text']}", file=sys.stderr)
        elif event["event"] in ("died", "re-formed"):
            say(options, event["text"])
        elif event["event"] == "begun" and event["step"]:
            say(options, f"going on after step {event['step']} of {event['steps']}: {event['how']}")

    task = {"task": "train", "file": str(path), "flags": held.asked["flags"], "techniques": chosen.as_json()["techniques"],
            "steps": job.steps, "folder": str(folder.path), "memory": memory, "predicted": chosen.process_bytes, "cadence": cadence,
            "traceback": options.traceback}
    try:
        if crew.world == 1:
            result = run_worker(task, worker_environment(chosen.techniques), show, held.lock.file)
        else:
            result = grouped(task, held, crew, meeting, show)
    except OutOfMemory as error:
        raise OverBudget(after_memory_ran_out(options, job, held, chosen, str(error)), chosen) from error
    finally:
        if board is not None:
            board.close()
    told = story(folder.path)
    if "stopped" in result:
        said = told["text"] if result["stopped"] else "stopped before it trained a step"
        say(options, f"{said}; the same command goes on from there")
        (folder.path / "report.html").write_text(page(told))
        return STOPPED
    plan = folder.read("plan.json")
    report = {
        "run": str(folder.path), "job": options.job, "flags": held.asked["flags"], "steps": told["step"], "losses": told["losses"],
        "budget": {"memory": memory}, "predicted": plan["predicted"],
        "measured": told["measured"], "techniques": plan["techniques"],
        "weights_sha256": result["weights_sha256"], "exact": chosen.exact, "sure": chosen.sure,
        "shown": result.get("shown", ""), "state_of_techniques": result["state"],
    } | {name: result[name] for name in ("world", "restarts", "recovery_seconds") if name in result}
    if "restarts" in result:
        report["sent_bytes"] = {"predicted": plan["predicted"].get("sent_bytes"), "measured": told["measured"].get("sent_bytes")}
    try:
        folder.write("report.json", report)
    except OSError as error:
        print(f"warning: the run is done, but its report can't be written ({error.strerror}): free some space and give the same command",
              file=sys.stderr)
    return reported(options, report, folder.path)


def require_means(chosen: Plan, crew: Team, folder: Path) -> None:
    """Refuse a plan that these workers, or this disk, can't carry out."""
    from shoestring.memory.shelf import require_room
    from shoestring.planning.conflicts import unites

    if crew.world > 1 and not any(map(unites, chosen.techniques)):
        raise Mistake(f"{chosen} is a plan for one worker, with nothing that unites {crew.world}: they would train apart; plan for them "
                      f"(--devices without --plan, --fresh in a folder that has a plan), or train with one")
    require_room(folder, chosen.stored, sum(file.stat().st_blocks * 512 for file in folder.glob("*.bin")))


def meeting_of(crew: Team) -> AbstractContextManager[Meeting | None]:
    """Where other machines come to, if there are some: open before the plan is made, so that they can wait for it."""
    if crew.nodes is None:
        from contextlib import nullcontext

        return nullcontext()
    from shoestring.meeting import Meeting

    return Meeting(crew.nodes)


def grouped(task: dict[str, Any], held: Opened, crew: Team, meeting: Meeting | None, show: Any) -> dict[str, Any]:
    """Train in a group of workers, here and on the machines of a meeting."""
    from shoestring.api import worker_environment
    from shoestring.group import run_group
    from shoestring.launch import fingerprint
    from shoestring.planning.plan import techniques_in

    if meeting is not None:
        there = {"folder": str(held.folder.path.resolve()), "fingerprint": fingerprint(task["file"])}
        meeting.give("task", {"task": task | there, "asked": dict(held.asked)})
    return run_group(task, worker_environment(techniques_in(task["techniques"])), show, held.lock.file, crew.devices, meeting,
                     crew.patience, crew.restarts)


def reported(options: Namespace, report: dict[str, Any], run: Path) -> int:
    """Write the page of a run that is finished and tell the user of it."""
    import json
    from pathlib import Path

    from shoestring.page import page
    from shoestring.runs.story import story

    for place in filter(None, (run / "report.html", options.report)):
        try:
            Path(place).write_text(page(story(run)))
        except OSError as error:
            print(f"warning: {place} can't be written: {error.strerror}", file=sys.stderr)
    if options.json:
        print(json.dumps(report))
    else:
        show_report(report, options.report or run / "report.html")
    return DONE


def after_memory_ran_out(options: Namespace, job: Job, held: Opened, chosen: Plan, why: str) -> str:
    """Plan again with what was measured; gives what to tell the user."""
    from shoestring.api import plan as make_plan
    from shoestring.core.units import bytes_text
    from shoestring.measure.process import memory_free
    from shoestring.runs.checkpoints import newest_good
    from shoestring.runs.story import story

    told = story(held.folder.path)
    good, _ = newest_good(held.folder.checkpoints)
    kept = f"its checkpoint of step {good.step} is whole" if good else "it had no checkpoint yet, so it will begin anew"
    measured = told.get("measured", {}).get("process_bytes", 0)
    most = max(measured, chosen.process_bytes)
    budget = held.asked["memory"] or int(0.9 * memory_free())
    said = f"the run stopped after step {told['step']} because {why}; {kept}. It was planned for {bytes_text(chosen.process_bytes)} " \
           f"and had {bytes_text(measured)} at its last step"
    say(options, "planning again with what was measured …")
    try:
        outcome = make_plan(job, int(min(0.9, chosen.process_bytes / most) * min(budget, most)), None, held.asked["inexact"],
                            devices=team(options).world)
    except (Mistake, OverBudget) as error:   # nothing fits, or planning, which trains a few steps, met the same
        return f"{said}; planning again led to nothing: {error}"
    held.folder.write("plan-next.json", plan_file(outcome.chosen, outcome.as_json() | {"blocks": outcome.chosen.blocks}))
    return (f"{said}. A plan with more room is ready, {outcome.chosen} at {bytes_text(outcome.chosen.process_bytes)}: "
            f"go on with it by the same command and --run {held.folder.path} --replan")


def show_step(options: Namespace, event: dict[str, Any], steps: int, memory: int | None) -> None:
    """The line that moves; on a pipe, every tenth step."""
    from shoestring.terminal import progress

    if not options.json and (sys.stderr.isatty() or event["step"] % 10 in (0, 1) or event["step"] == steps):
        left = (steps - event["step"]) * event["seconds"]
        end = "\r" if sys.stderr.isatty() else "\n"
        print(progress(event["step"], steps, event["loss"], event["most"], memory, left), end=end, file=sys.stderr)


def show_report(report: dict[str, Any], place: str | Path) -> None:
    from pathlib import Path

    from shoestring.terminal import beside

    print("", beside(report["predicted"], report["measured"]), "", sep="\n")
    if report["shown"]:
        print(report["shown"], "", sep="\n")
    first, last = report["losses"][0], report["losses"][-1]
    print(f"loss {first:.3f} -> {last:.3f} in {report['steps']} steps; weights {report['weights_sha256'][:12]}")
    print(f"report: {Path(place).resolve()}")


def watch(options: Namespace) -> int:
    from shoestring.watch.places import check

    for run in options.run:
        check(run)
    import json
    from pathlib import Path

    from shoestring.watch import serve

    def ready(url: str) -> None:
        print(json.dumps({"url": url}) if options.json else f"watching at {url} (Ctrl-C ends)", flush=True)

    serve([Path(run) for run in options.run], options.host, options.port, ready)
    return DONE


def export(options: Namespace) -> int:
    from shoestring.watch.places import is_run

    wrong = Mistake(f"{options.run} is not a run of shoestring: give the folder that `shoestring train` named")
    if not is_run(options.run):
        raise wrong
    import json
    from pathlib import Path

    from shoestring.runs.folder import Folder, source_of

    folder = Folder(Path(options.run))
    asked = folder.read("run.json")
    if not asked:
        raise wrong
    from shoestring.jobfile import loaded_job
    from shoestring.runs.export import checkpoint_of, export_hugging_face, export_steps, export_weights

    target = Path(options.out) if options.out else folder.path / ("export-hf" if options.to == "hf" else f"export.{options.to}")
    if options.to == "safetensors":
        made = export_weights(checkpoint_of(folder, options.step), target)
    elif options.to == "hf":
        made = export_hugging_face(checkpoint_of(folder, options.step), loaded_job(source_of(folder), asked["flags"]), target)
    else:
        made = export_steps(folder, options.to, target)
    print(json.dumps({"path": str(made)}) if options.json else f"written: {made}")
    return DONE


def plan_line(plan: dict[str, Any]) -> str:
    from shoestring.terminal import plan_name

    return plan_name(plan)


def verify(options: Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    if options.check_steps < 1:
        raise Mistake(f"--check-steps {options.check_steps}: compare at least one step")
    import json

    from shoestring.api import verified
    from shoestring.terminal import beside, table

    job = loaded(options, path, flags)
    chosen, _ = planned(options, job, memory)
    say(options, f"training {options.check_steps} steps plainly and with {chosen} …")
    report = verified(job, chosen, options.check_steps)
    if options.json:
        print(json.dumps(report))
        return DONE
    rows = [["", "weights", "largest difference", "stated", "verdict"]]
    rows += [[one["technique"], "same bits" if one["bit_equal"] else "not the same bits", f"{one['largest_difference']:.2g}",
              one["stated"], "kept" if one["kept"] else "NOT KEPT"] for one in report["verdicts"]]
    print(table(rows, right=(2,)))
    print("", beside(report["predicted"], report["measured"]), "", sep="\n")
    print("losses, plain and planned:")
    print("\n".join(f"  {plain:.6f}  {planned:.6f}" for plain, planned in report["losses"]))
    return DONE


def doctor(options: Namespace) -> int:
    import json
    from importlib.util import find_spec

    from shoestring.core.units import bytes_text

    if find_spec("torch") is None:
        raise Mistake("torch is not installed: pip install torch==2.13.0 (the CPU build), or the build for your GPU")
    from shoestring.launch import run_worker
    from shoestring.measure.probe import remember
    from shoestring.memory.allocator import LIBRARIES, library
    from shoestring.terminal import table

    say(options, "measuring this machine …")
    found = run_worker({"task": "doctor"}, {})
    found.pop("event")
    remember(found)
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
    if found["environment"]:
        rows.append(["workers start with", ", ".join(f"{name}={value}" for name, value in found["environment"].items())])
    rows += [["missing", text] for text in missing]
    print(table(rows))
    return DONE
