"""Shared by commands that take a job: its file and flags, the job made from them, and a plan for it."""

from __future__ import annotations

import os
from collections import namedtuple

from shoestring.core.errors import Mistake
from shoestring.show.ticker import ticking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.processes.nodes import Team
    from shoestring.runs.resume import Resolved
    from shoestring.training.options import PlanOptions
    from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan

ROOM = "shoestring.training.execution.job_planning"  # the module imported by commands of training

# path: of the job file; flags: values of the job's own flags
AskedJob = namedtuple("AskedJob", ["path", "flags"])


def asked_job(call: Call, job: str, course: Mapping[str, Any]) -> AskedJob:
    """The job that a command names, checked as far as possible without heavy imports. `course`: the given steps, epochs
    and seed, which are added to the job's flags."""
    from shoestring.core.command_line.suggest import nearest
    from shoestring.jobfile import job_path, parse_flags

    if not os.path.exists(job) and call.words[:1] and (meant := nearest(call.words[0], call.own_flags)):
        # its value looks like the job
        raise Mistake(f"{call.words[0]!r} is no option of this command; did you mean {meant}?")
    file = job_path(job)
    words = [*call.words, *(f"--{name}={value}" for name, value in course.items())]
    flags = parse_flags(file, words, call.own_flags)
    refuse_ambiguous(call, file)
    from pathlib import Path

    return AskedJob(Path(file), flags)


def refuse_ambiguous(call: Call, file: str) -> None:
    """Refuse a flag that could belong to the command or to the job."""
    from shoestring.jobfile import OF_EVERY_JOB, flags_of

    for flag in flags_of(file):
        if flag.name not in OF_EVERY_JOB and f"--{flag.name.replace('_', '-')}" in call.given & set(call.own_flags):
            raise Mistake(
                f"--{flag.name} is a flag of this command, and the job {os.path.basename(file)} has an argument of that name "
                f"too: give the job's argument another name"
            )


def load_job(call: Call, path: Path, flags: dict[str, Any], room: str = ROOM, silent: bool = False) -> Job:
    """The job. `room`: a module that the command will import anyway, imported now together with torch, which is
    quickest; `silent`: hide what the job prints, because a worker makes it again."""
    from importlib import import_module

    from shoestring.core.imports import WithoutGarbageCollection
    from shoestring.jobfile import load_job

    with WithoutGarbageCollection():
        import_module(room)
        from shoestring.processes.chatter import overheard
    try:
        with ticking(f"running {path.name}"), overheard(silent):
            return load_job(path, flags)
    except Mistake as error:
        if call.traceback and error.__cause__ is not None:
            import traceback

            traceback.print_exception(error.__cause__)
        raise


def check_flags(folder: str, path: Path, flags: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse flags of a run, or from node 0, that the user did not give here and that could name a file or have an
    impossible value."""
    from pathlib import Path

    if set(flags) - set(given):
        from shoestring.processes.named_job import Claim, check_taken

        check_taken(Claim(Path(folder)), str(path), {name: value for name, value in flags.items() if name not in given})


class JobLoader:
    """Makes the job of a file, once per set of flags. `given`: flags of this command; the others are those of the
    resumed `run`."""

    def __init__(
        self, call: Call, asked: AskedJob, run: str | Path | None, room: str = ROOM, silent: bool = False
    ) -> None:
        self.call, self.path, self.given, self.run = call, asked.path, asked.flags, run
        self.room, self.silent = room, silent
        self.made: list[tuple[Mapping[str, Any], Job]] = []

    def job(self, flags: Mapping[str, Any]) -> Job:
        check_flags(str(self.run or "the run"), self.path, flags, self.given)
        if not self.made or self.made[0][0] != flags:
            self.made[:] = [(dict(flags), load_job(self.call, self.path, dict(flags), self.room, self.silent))]
        return self.made[0][1]

    def resolve(self, flags: Mapping[str, Any]) -> Resolved:
        """The arguments of the job and the local modules it has imported."""
        from shoestring.jobfile import resolved_arguments
        from shoestring.runs.modules import imported_modules
        from shoestring.runs.resume import Resolved

        job = self.job(flags)
        return Resolved(resolved_arguments(job), imported_modules())


def plan_for(
    call: Call, job: Job, asked: PlanOptions, workers: Team, hardware: str | Path | None = None, silent: bool = False
) -> TrainingOutcome:
    """The planner's outcome, or the saved plan that is replayed."""
    from pathlib import Path

    from shoestring.planning.plan import Outcome
    from shoestring.processes.chatter import overheard
    from shoestring.training.commands.progress import telling
    from shoestring.training.execution.job_planning import plan_job
    from shoestring.training.planning.plan import load_plan

    if asked.plan:
        plan = load_plan(Path(asked.plan))
        check_from_file(job, plan, asked.exact, workers, silent)
        return Outcome(plan)
    # The job's own output is shown once and apart from our messages
    with telling(call) as doing, overheard(silent) as aloud:
        return plan_job(job, asked, workers.world, workers.devices, hardware=hardware, on_progress=aloud(doing))


def check_from_file(job: Job, plan: TrainingPlan, exact: str | None, workers: Team, silent: bool) -> None:
    """Refuse a plan from a file that can't be used for a job."""
    if not plan.techniques:
        return
    from shoestring.processes.chatter import overheard
    from shoestring.training.execution.job_planning import check_here

    with overheard(silent):
        check_here(job, plan.techniques, exact, workers.world, workers.devices)
