"""The command line: the only place that reads arguments and prints. Nothing heavy is imported before it is needed."""
from __future__ import annotations

import argparse
import sys

from shoestring.core.errors import Mistake, OverBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, NoReturn

    from shoestring.core.job import Job
    from shoestring.planning.plan import Plan

DONE, MISTAKE, OVER_BUDGET, FAULT, STOPPED = 0, 2, 3, 1, 130


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    top = Parser(prog="shoestring", description="Deep learning on a budget: your PyTorch model and your memory, "
                                                "the plan that meets it, and the proof.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in (("plan", "what would it take: every technique costed, the best plan chosen and explained"),
                       ("train", "run that plan and show predicted beside measured"),
                       ("verify", "plain training and the plan side by side, from the same seed: the same weights?")):
        command = commands.add_parser(name, help=text, description=text, epilog="The job's own arguments are flags too; "
                                      "built-in jobs: gpt (a byte-level transformer on Python's own source), digits (a conv net)")
        command.add_argument("job", help="a Python file with `def job(...) -> Job`, or the name of a built-in job")
        command.add_argument("--memory", help="most bytes of the process, such as 600MiB (default: what is free)")
        command.add_argument("--use", action="append", metavar="TECHNIQUE",
                             help='exactly these techniques instead of planning, such as "Checkpoint(every=2)"; may be repeated')
        command.add_argument("--plan", metavar="FILE", help="replay a plan that was saved")
        command.add_argument("--inexact", action="store_true", help="allow techniques that change the numbers, such as bf16")
        if name == "plan":
            command.add_argument("--save", metavar="FILE", help="save the chosen plan")
        if name == "train":
            command.add_argument("--run", metavar="DIR", help="directory for the plan and report (default: runs/JOB-TIME)")
            command.add_argument("--report", metavar="FILE", help="where to write the report page as well")
        if name == "verify":
            command.add_argument("--check-steps", type=int, default=5, metavar="N", help="steps to compare (default 5)")
        common(command)
    command = commands.add_parser("doctor", help="devices, memory, which dtypes really work, disk speed, what is missing",
                                  description="Looks at this machine and measures it anew.")
    common(command)
    return top


def common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    command.add_argument("--traceback", action="store_true", help="show where an error came from")


def main(words: list[str] | None = None) -> None:
    raise SystemExit(run(sys.argv[1:] if words is None else words))


def run(words: list[str]) -> int:
    """Do a command; gives its exit code."""
    shown = "--traceback" in words
    try:
        options, rest = parser().parse_known_args(words)
        if options.command == "doctor":
            if rest:
                raise Mistake(f"{rest[0]!r} is no option of doctor; see shoestring doctor --help")
            return doctor(options)
        from pathlib import Path

        from shoestring.core.units import parse_bytes
        from shoestring.jobfile import job_path, parsed_flags

        path = job_path(options.job)
        flags = parsed_flags(path, rest)
        memory = None if options.memory is None else parse_bytes(options.memory)
        if options.plan and options.use:
            raise Mistake("--plan and --use say two different things: give one of them")
        for file in filter(None, (options.plan,)):
            if not Path(file).exists():
                raise Mistake(f"there is no plan file {file}; save one with: shoestring plan JOB --memory 2GiB --save {file}")
        return {"plan": plan, "train": train, "verify": verify}[options.command](options, path, flags, memory)
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
    kind = "" if code == MISTAKE else f"{type(error).__name__}: "
    print(f"shoestring: {kind}{error}", file=sys.stderr)
    return code


def refused(error: OverBudget, as_json: bool) -> int:
    nearest: Any = error.nearest
    if as_json:
        import json

        print(json.dumps({"error": str(error), "least_bytes": nearest.process_bytes, "nearest": nearest.as_json()}))
    print(f"shoestring: {error}", file=sys.stderr)
    return OVER_BUDGET


def loaded(options: argparse.Namespace, path: Path, flags: dict[str, Any]) -> Job:
    from shoestring.jobfile import loaded_job

    try:
        return loaded_job(path, flags)
    except Mistake as error:
        if options.traceback and error.__cause__ is not None:
            import traceback

            traceback.print_exception(error.__cause__)
        raise


def planned(options: argparse.Namespace, job: Job, memory: int | None) -> tuple[Plan, dict[str, Any]]:
    """The plan to run and the planner's outcome as JSON (empty when a saved plan is replayed)."""
    from pathlib import Path

    from shoestring.api import plan as make_plan
    from shoestring.planning.plan import load_plan

    if options.plan:
        return load_plan(Path(options.plan)), {}
    say(options, "planning …")
    outcome = make_plan(job, memory, options.use, options.inexact)
    return outcome.chosen, outcome.as_json() | {"blocks": outcome.chosen.blocks}


def say(options: argparse.Namespace, text: str) -> None:
    """A word for the person in front of the terminal; never in the way of --json."""
    if sys.stderr.isatty() or not options.json:
        print(text, file=sys.stderr)


def whys() -> dict[str, str]:
    from shoestring.planning.catalogue import CATALOGUE

    return {kind.__name__: str(kind.why) for kind in CATALOGUE}


def plan(options: argparse.Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    import json
    from pathlib import Path

    from shoestring.terminal import plan_text

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


def worker_task(name: str, path: Path, flags: dict[str, Any], plan: Plan, **more: Any) -> dict[str, Any]:
    return {"task": name, "file": str(path), "flags": flags, "techniques": plan.as_json()["techniques"]} | more


def train(options: argparse.Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    import json
    import time
    from pathlib import Path

    from shoestring.api import worker_environment
    from shoestring.core.units import bytes_text, seconds_text
    from shoestring.launch import run_worker
    from shoestring.page import page
    from shoestring.terminal import beside, plan_text, progress

    job = loaded(options, path, flags)
    chosen, outcome = planned(options, job, memory)
    if outcome and memory is not None and chosen.process_bytes > memory:
        raise OverBudget(f"{chosen} needs {bytes_text(chosen.process_bytes)}, more than the {bytes_text(memory)} of --memory", chosen)
    if not options.json and outcome:
        print(plan_text(outcome, whys()), "", sep="\n")
    folder = Path(options.run) if options.run else Path("runs") / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=True)
    chosen.save(folder / "plan.json")
    started = time.perf_counter()
    curve: list[tuple[float, int]] = []

    def show(event: dict[str, Any]) -> None:
        passed = time.perf_counter() - started
        curve.append((passed, event["process"]))
        if not options.json and (sys.stderr.isatty() or event["step"] % 10 in (0, 1) or event["step"] == job.steps):
            left = (job.steps - event["step"]) * event["seconds"]
            end = "\r" if sys.stderr.isatty() else "\n"
            print(progress(event["step"], job.steps, event["loss"], event["most"], memory, left), end=end, file=sys.stderr)

    result = run_worker(worker_task("train", path, flags, chosen, steps=job.steps, traceback=options.traceback),
                        worker_environment(chosen.techniques), show)
    predicted = {"peak_bytes": chosen.peak_bytes, "process_bytes": chosen.process_bytes, "step_seconds": chosen.step_seconds}
    reasons = whys()
    report = {
        "run": str(folder), "job": options.job, "flags": flags, "steps": result["steps"], "losses": result["losses"],
        "budget": {"memory": memory}, "predicted": predicted, "measured": result["measured"],
        "techniques": [one | {"why": reasons.get(one["name"], "")} for one in chosen.as_json()["techniques"]],
        "weights_sha256": result["weights_sha256"], "exact": chosen.exact, "sure": chosen.sure,
        "shown": result.get("shown", ""), "state": result["state"],
    }
    extra = {"plain": outcome.get("plain", {}), "blocks": outcome.get("blocks", ()), "samples_process": curve,
             "runners_up": [one | {"text": plan_line(one)} for one in outcome.get("runners_up", ())]}
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    for place in filter(None, (folder / "report.html", options.report)):
        Path(place).write_text(page(report | extra))
    if options.json:
        print(json.dumps(report))
        return DONE
    print("", beside(predicted, result["measured"]), "", sep="\n")
    if report["shown"]:
        print(report["shown"], "", sep="\n")
    print(f"loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f} in {result['steps']} steps, "
          f"{seconds_text(time.perf_counter() - started)}; weights {result['weights_sha256'][:12]}")
    print(f"report: {Path(options.report or folder / 'report.html').resolve()}")
    return DONE


def plan_line(plan: dict[str, Any]) -> str:
    from shoestring.terminal import plan_name

    return plan_name(plan)


def verify(options: argparse.Namespace, path: Path, flags: dict[str, Any], memory: int | None) -> int:
    import json

    from shoestring.api import verified
    from shoestring.terminal import beside, table

    if options.check_steps < 1:
        raise Mistake(f"--check-steps {options.check_steps}: compare at least one step")
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


def doctor(options: argparse.Namespace) -> int:
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
            ["fresh memory", f"{found['fault'] * 2**30:.2f} s per GiB in small pages, {found['huge_fault'] * 2**30:.2f} in huge ones"]]
    rows += [[f"dtype {name}", what or "works"] for name, what in found["dtypes"].items()]
    if found["environment"]:
        rows.append(["workers start with", ", ".join(f"{name}={value}" for name, value in found["environment"].items())])
    rows += [["missing", text] for text in missing]
    print(table(rows))
    return DONE



