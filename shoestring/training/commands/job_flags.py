"""What commands of a job share: its file and flags, the job that they make, and a plan for it."""

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

    from shoestring.core.command import Call
    from shoestring.core.job import Job
    from shoestring.processes.nodes import Team
    from shoestring.runs.resume import Resolved
    from shoestring.training.options import PlanOptions
    from shoestring.training.plan import TrainingOutcome, TrainingPlan

ROOM = "shoestring.training.execution.job_planning"  # what commands of training import

# path: of the job's file; flags: values of the job's own flags
AskedJob = namedtuple("AskedJob", ["path", "flags"])


def asked_job(call: Call, job: str, course: Mapping[str, Any]) -> AskedJob:
    """The job that a command names, checked as far as that is possible without importing anything heavy. `course`: steps, epochs and seed
    as they were given, which are among the job's flags from here on."""
    from shoestring.core.suggest import nearest
    from shoestring.jobfile import job_path, parsed_flags

    if not os.path.exists(job) and call.words[:1] and (meant := nearest(call.words[0], call.own_flags)):
        # its value now looks like the job
        raise Mistake(f"{call.words[0]!r} is no option of this command; did you mean {meant}?")
    file = job_path(job)
    words = [*call.words, *(f"--{name}={value}" for name, value in course.items())]
    flags = parsed_flags(file, words, call.own_flags)
    refuse_ambiguous(call, file)
    from pathlib import Path

    return AskedJob(Path(file), flags)


def refuse_ambiguous(call: Call, file: str) -> None:
    """Refuse a flag that could be the command's and the job's."""
    from shoestring.jobfile import OF_EVERY_JOB, flags_of

    for flag in flags_of(file):
        if flag.name not in OF_EVERY_JOB and f"--{flag.name.replace('_', '-')}" in call.given & set(call.own_flags):
            raise Mistake(
                f"--{flag.name} is a flag of this command, and the job {os.path.basename(file)} has an argument of that name "
                f"too: give the job's argument another name"
            )


def loaded(call: Call, path: Path, flags: dict[str, Any], room: str = ROOM, silent: bool = False) -> Job:
    """The job; `room`: what the command will import anyway, with torch, and is imported now, when that is quickest; `silent`: what it
    prints is not shown, because a worker makes it again."""
    from importlib import import_module

    from shoestring.core.imports import WithoutGarbageCollection
    from shoestring.jobfile import loaded_job

    with WithoutGarbageCollection():
        import_module(room)
        from shoestring.processes.chatter import overheard
    try:
        with ticking(f"running {path.name}"), overheard(silent):
            return loaded_job(path, flags)
    except Mistake as error:
        if call.traceback and error.__cause__ is not None:
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
    """Makes the job of a file, once for the same flags. `given`: flags of this command; others are those of the `run` that goes on."""

    def __init__(
        self, call: Call, asked: AskedJob, run: str | Path | None, room: str = ROOM, silent: bool = False
    ) -> None:
        self.call, self.path, self.given, self.run = call, asked.path, asked.flags, run
        self.room, self.silent = room, silent
        self.made: list[tuple[Mapping[str, Any], Job]] = []

    def job(self, flags: Mapping[str, Any]) -> Job:
        check_flags(str(self.run or "the run"), self.path, flags, self.given)
        if not self.made or self.made[0][0] != flags:
            self.made[:] = [(dict(flags), loaded(self.call, self.path, dict(flags), self.room, self.silent))]
        return self.made[0][1]

    def resolve(self, flags: Mapping[str, Any]) -> Resolved:
        """The arguments that the job is made with, and the local modules that it has imported."""
        from shoestring.jobfile import resolved_arguments
        from shoestring.runs.modules import imported_modules
        from shoestring.runs.resume import Resolved

        job = self.job(flags)
        return Resolved(resolved_arguments(job), imported_modules())


def plan_for(
    call: Call, job: Job, asked: PlanOptions, workers: Team, hardware: str | Path | None = None, silent: bool = False
) -> TrainingOutcome:
    """What planning found, or the saved plan that is replayed."""
    from pathlib import Path

    from shoestring.planning.plan import Outcome
    from shoestring.processes.chatter import overheard
    from shoestring.training.commands.progress import telling
    from shoestring.training.execution.job_planning import plan_job
    from shoestring.training.plan import load_plan

    if asked.plan:
        plan = load_plan(Path(asked.plan))
        check_from_file(job, plan, asked.exact, workers, silent)
        return Outcome(plan)
    # What the job says meanwhile is overheard; what we say is said aloud
    with telling(call) as doing, overheard(silent) as aloud:
        return plan_job(job, asked, workers.world, workers.devices, hardware=hardware, on_progress=aloud(doing))


def check_from_file(job: Job, plan: TrainingPlan, exact: str | None, workers: Team, silent: bool) -> None:
    """Refuse a plan that was read from a file and can't be used for a job."""
    if not plan.techniques:
        return
    from shoestring.processes.chatter import overheard
    from shoestring.training.execution.job_planning import check_here

    with overheard(silent):
        check_here(job, plan.techniques, exact, workers.world, workers.devices)
