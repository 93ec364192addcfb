"""What `plan`, `train` and `verify` share: flags that name a job, a budget and a plan, and what follows from them."""

from __future__ import annotations

import os
from collections import namedtuple

from shoestring.commands.ticker import ticking
from shoestring.core.errors import Mistake
from shoestring.core.exactness import ASKED, Exactness, allowed_levels, rename_hint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.processes.nodes import Team
    from shoestring.runs.resume import Resolved
    from shoestring.training.plan import Plan

# path: of the job's file; flags: values of the job's own flags; memory: bytes, None: what is free
Asked = namedtuple("Asked", ["path", "flags", "memory"])


def job_flags(parser: ArgumentParser) -> None:
    """A job, and how it may be trained."""
    from shoestring.jobfile import OF_EVERY_JOB

    parser.epilog = (
        "The job's own arguments are flags too: name the job before --help to see them. Built-in jobs: gpt (a byte-level "
        "transformer on Python's own source), digits (a conv net)"
    )
    parser.set_defaults(job_words=[], own_flags=[], given=set())
    parser.add_argument("job", help="a Python file with `def job(...) -> Job`, or the name of a built-in job")
    parser.add_argument(
        "--memory",
        help="most bytes of the training process, such as 600MiB; those that load data are not counted "
        "(default: what is free)",
    )
    for name, what in OF_EVERY_JOB.items():
        parser.add_argument(f"--{name}", metavar="N", help=what)
    parser.add_argument(
        "--use",
        action="append",
        metavar="TECHNIQUE",
        help='exactly these techniques instead of planning, such as "Checkpoint(every=2)"; may be repeated',
    )
    parser.add_argument("--plan", metavar="FILE", help="replay a plan that was saved")
    parser.add_argument(
        "--fresh-plan",
        action="store_true",
        help="measure again what was measured when this job was planned before (after its data changed, say)",
    )
    parser.add_argument(
        "--exact",
        type=level_name,
        choices=list(ASKED),
        help="the least that the weights must be of those of plain training: "
        + ", ".join(f"{name} ({level.word})" for name, level in ASKED.items())
        + f" (default: {Exactness.ROUNDING.word} if such a plan fits, else {Exactness.DISTRIBUTION.word})",
    )
    parser.add_argument(
        "--inexact",
        action="store_true",
        help=f"allow weights that are {Exactness.CHANGED.word}: techniques that compute other numbers, such as bf16",
    )


def level_name(text: str) -> str:
    """What was typed after --exact; a name that a level had before is answered with its name of today."""
    if hint := rename_hint(text):
        from argparse import ArgumentTypeError

        raise ArgumentTypeError(hint)
    return text


def team_flags(parser: ArgumentParser) -> None:
    """How many workers train together, and where."""
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="workers on this machine that train together (default 1)"
    )
    parser.add_argument(
        "--nodes",
        metavar="HOST:PORT,RANK/OF",
        help="train with other machines: all give the same command, with their own rank; HOST has rank 0",
    )
    parser.add_argument(
        "--patience",
        default="30s",
        metavar="TIME",
        help="without a sign of life for so long, a worker is replaced (default 30s)",
    )
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="how often to go on after a worker's death (default 10)"
    )


def asked(options: Namespace) -> Asked:
    """What the flags say, checked as far as that is possible without importing anything heavy."""
    from shoestring.core.suggest import nearest
    from shoestring.core.units import budget_bytes
    from shoestring.jobfile import job_path, parsed_flags

    if (
        not os.path.exists(options.job)
        and options.job_words[:1]
        and (meant := nearest(options.job_words[0], options.own_flags))
    ):
        # its value now looks like the job
        raise Mistake(f"{options.job_words[0]!r} is no option of this command; did you mean {meant}?")
    file = job_path(options.job)
    flags = parsed_flags(file, options.job_words + course_words(options), options.own_flags)
    refuse_ambiguous(options, file)
    memory = None if options.memory is None else budget_bytes(options.memory)
    allowed_levels(options.exact, options.inexact)
    if options.plan and options.use:
        raise Mistake("--plan and --use say two different things: give one of them")
    if options.use:
        from shoestring.planning.names import check_written

        for written in options.use:
            check_written(written, "shoestring.training")
    if options.plan and not os.path.exists(options.plan):
        raise Mistake(
            f"there is no plan file {options.plan}; save one with: shoestring plan JOB --memory 2GiB --save {options.plan}"
        )
    from pathlib import Path

    return Asked(Path(file), flags, memory)


def refuse_ambiguous(options: Namespace, file: str) -> None:
    """Refuse a flag that could be the command's and the job's."""
    from shoestring.jobfile import OF_EVERY_JOB, flags_of

    for flag in flags_of(file):
        if flag.name not in OF_EVERY_JOB and f"--{flag.name.replace('_', '-')}" in options.given & set(
            options.own_flags
        ):
            raise Mistake(
                f"--{flag.name} is a flag of this command, and the job {os.path.basename(file)} has an argument of that name "
                f"too: give the job's argument another name"
            )


def course_words(options: Namespace) -> list[str]:
    """--steps, --epochs and --seed as they were given: they are among the job's flags from here on."""
    from shoestring.jobfile import OF_EVERY_JOB

    return [
        word
        for name in OF_EVERY_JOB
        if vars(options)[name] is not None
        for word in (f"--{name}={vars(options)[name]}",)
    ]


def team(options: Namespace) -> Team:
    """Who trains together, from what the user wrote, or from what torchrun or SLURM put into the environment."""
    from shoestring.processes.nodes import Team, team_of

    if "devices" not in options:
        return Team()
    return team_of(options.devices, options.nodes, options.patience, options.restarts, os.environ)


def loaded(options: Namespace, path: Path, flags: dict[str, Any], room: str = "shoestring.api") -> Job:
    """The job; `room`: what the command will import anyway, with torch, and is imported now, when that is quickest."""
    from importlib import import_module

    from shoestring.core.imports import WithoutGarbageCollection
    from shoestring.jobfile import loaded_job

    with WithoutGarbageCollection():
        import_module(room)
        from shoestring.processes.chatter import overheard
    try:
        with ticking(f"running {path.name}"), overheard(silent=options.command == "train"):  # then the worker says it
            return loaded_job(path, flags)
    except Mistake as error:
        if options.traceback and error.__cause__ is not None:
            import traceback

            traceback.print_exception(error.__cause__)
        raise


def check_flags(folder: str, path: Path, flags: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse flags of a run, or of node 0, that the user did not give here and that could name a file, or can't be."""
    from pathlib import Path

    if set(flags) - set(given):
        from shoestring.processes.named_job import Claim, check_taken

        check_taken(Claim(Path(folder)), str(path), {name: value for name, value in flags.items() if name not in given})


class JobLoader:
    """Makes the job of a file, once for the same flags. `given`: flags of this command; others are those of a run that goes on."""

    def __init__(self, options: Namespace, path: Path, given: Mapping[str, Any], room: str = "shoestring.api") -> None:
        self.options, self.path, self.given, self.room = options, path, given, room
        self.made: list[tuple[Mapping[str, Any], Job]] = []

    def job(self, flags: Mapping[str, Any]) -> Job:
        check_flags(self.options.run or "the run", self.path, flags, self.given)
        if not self.made or self.made[0][0] != flags:
            self.made[:] = [(dict(flags), loaded(self.options, self.path, dict(flags), self.room))]
        return self.made[0][1]

    def resolve(self, flags: Mapping[str, Any]) -> Resolved:
        """The arguments that the job is made with, and the local modules that it has imported."""
        from shoestring.jobfile import resolved_arguments
        from shoestring.runs.modules import imported_modules
        from shoestring.runs.resume import Resolved

        job = self.job(flags)
        return Resolved(resolved_arguments(job), imported_modules())


def planned(
    options: Namespace, job: Job, memory: int | None, hardware: str | None = None
) -> tuple[Plan, dict[str, Any]]:
    """The plan to run and the planner's outcome as JSON (empty when a saved plan is replayed)."""
    from pathlib import Path

    from shoestring.commands.progress import telling
    from shoestring.processes.chatter import overheard
    from shoestring.training.execution import job_planning
    from shoestring.training.plan import load_plan

    workers = team(options)
    if options.plan:
        plan = load_plan(Path(options.plan))
        check_from_file(options, job, plan, options.exact)
        return plan, {}
    # What the job says meanwhile is overheard; what we say is said aloud
    with telling(options) as doing, overheard(silent=options.command == "train") as aloud:
        outcome = job_planning.planned(
            job,
            memory,
            options.use,
            options.inexact,
            devices=workers.world,
            here=workers.devices,
            hardware=hardware,
            exact=options.exact,
            fresh=options.fresh_plan,
            on_progress=aloud(doing),
        )
    return outcome.chosen, outcome.as_json() | {"blocks": outcome.chosen.blocks}


def check_from_file(options: Namespace, job: Job, plan: Plan, exact: str | None) -> None:
    """Refuse a plan that was read from a file and can't be used for a job."""
    if not plan.techniques:
        return
    from shoestring.processes.chatter import overheard
    from shoestring.training.execution.job_planning import check_here

    workers = team(options)
    with overheard(silent=options.command == "train"):
        check_here(job, plan.techniques, exact, workers.world, workers.devices)


def reasons() -> dict[str, str]:
    """What every technique is good for, by its name."""
    from shoestring.training.catalogue import CATALOGUE

    return {kind.__name__: str(kind.why) for kind in CATALOGUE}
