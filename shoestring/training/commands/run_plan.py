"""The plan of a run that `train` starts or resumes: the stored one, a new one, or one made after memory ran out."""

from __future__ import annotations

from shoestring.core.errors import Mistake, OverBudget
from shoestring.show.output import say
from shoestring.training.commands.job_flags import check_from_file, plan_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.processes.nodes import Team
    from shoestring.runs.folder import Folder
    from shoestring.runs.request import Request
    from shoestring.runs.session import Session
    from shoestring.training.options import PlanOptions
    from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan


def why_unplaced(chosen: TrainingPlan, world: int) -> str:
    """Why this number of workers can't execute a plan; empty if it can."""
    from shoestring.training.group_technique import axes_not_united, mesh_sizes

    try:
        sizes = mesh_sizes(chosen.techniques, world)
    except Mistake as error:
        return str(error)
    if apart := axes_not_united(chosen.techniques, sizes):
        return f"of {world} workers, the {sizes[apart[0]]} along the axis {apart[0]} have nothing that unites them in {chosen}"
    return ""


def request_without_workers(folder: Folder, request: Request, reason: str, world: int) -> Request:
    """The request without the techniques that arrange workers, which were for another number of them. The run continues
    from its checkpoint, which is that of one process."""
    from dataclasses import replace

    from shoestring.core.technique import parse_technique, text
    from shoestring.runs.events.event import Adopted
    from shoestring.runs.events.event_log import note
    from shoestring.training.catalogue import CATALOGUE, TOGETHER
    from shoestring.training.group_technique import uniting

    note(folder.path, Adopted((f"a plan for {world} workers, because {reason}",)))
    use = request.use
    if use:
        rest = [
            one
            for one in (parse_technique(written, CATALOGUE) for written in use)
            if not any(group.across for group in uniting([one]))
        ]
        united = world == 1 or uniting(rest)
        use = tuple(map(text, rest if united else (*rest, TOGETHER)))
    return replace(request, use=use)


def following_plan(asked: PlanOptions, job: Job, folder: Folder, exact: str | None, workers: Team) -> TrainingPlan:
    """The plan that was made after the run ran out of memory; from now on it is the run's plan."""
    from shoestring.runs.events.event import Adopted
    from shoestring.runs.events.event_log import note
    from shoestring.runs.session import kept_plan
    from shoestring.training.planning.plan import check_paths, plan_in

    following = folder.path / "plan-next.json"
    if not following.exists():
        raise Mistake(
            f"{folder.path} did not run out of memory, so nothing was measured to plan from: leave --replan out, "
            f"or give another --memory with --adopt"
        )
    chosen = kept_plan(folder, plan_in, name="plan-next.json")
    assert chosen is not None, "the file is there"
    check_paths(chosen.techniques, asked.use_texts or (), following)
    check_from_file(job, chosen, exact, workers, silent=True)
    following.rename(folder.path / "plan.json")
    note(folder.path, Adopted(("the plan made from what was measured",)))
    return chosen


def new_plan(
    asked: PlanOptions, call: Call, job: Job, folder: Folder, request: Request, workers: Team
) -> TrainingOutcome:
    """Make a plan for a run's request."""
    from dataclasses import replace

    from shoestring.core.budget import Budget
    from shoestring.core.technique import parse_technique
    from shoestring.core.units import bytes_text
    from shoestring.runs.events.event import Planning
    from shoestring.runs.events.event_log import note
    from shoestring.training.catalogue import CATALOGUE
    from shoestring.training.planning.plan import check_paths

    memory = request.memory
    check_paths(
        (parse_technique(one, CATALOGUE) for one in request.use or ()), asked.use_texts or (), folder.path / "run.json"
    )
    note(folder.path, Planning(memory))
    of_run = replace(asked, memory=memory, use=request.use, inexact=request.inexact, exact=request.exact)
    outcome = plan_for(call, job, of_run, workers, silent=True)
    chosen = outcome.chosen
    for one in Budget(memory=memory).broken_limits(chosen.numbers()) if outcome.plain is not None else ():
        raise OverBudget(
            f"{chosen} needs {bytes_text(one.found)}, more than the {bytes_text(one.limit.value)} of --memory", chosen
        )
    return outcome


def require_means(chosen: TrainingPlan, workers: Team, folder: Path) -> None:
    """Refuse a plan that these workers, or this disk, can't execute."""
    from shoestring.training.group_technique import uniting
    from shoestring.training.memory.offload.disk_store import require_room

    if workers.world > 1 and not uniting(chosen.techniques):
        raise Mistake(
            f"{chosen} is a plan for one worker, with nothing that unites {workers.world}: they would train apart; plan for them "
            f"(--devices without --plan, --fresh in a folder that has a plan), or train with one"
        )
    if reason := why_unplaced(chosen, workers.world):
        raise Mistake(
            f'{reason}: they would train apart; add --use "DataParallel()", or give as many --devices as the plan has places'
        )
    require_room(
        folder, int(chosen.predicted["stored_bytes"]), sum(file.stat().st_blocks * 512 for file in folder.glob("*.bin"))
    )


def after_memory_ran_out(call: Call, workers: Team, job: Job, held: Session, chosen: TrainingPlan, why: str) -> str:
    """Plan again, using what was measured; returns the message for the user."""
    from shoestring.core.units import bytes_text
    from shoestring.measure.process import memory_free
    from shoestring.runs.checkpoints.checkpoints import newest_good
    from shoestring.runs.reports.report import report_of
    from shoestring.training.execution.job_planning import plan_job
    from shoestring.training.options import PlanOptions

    told = report_of(held.folder.path)
    good, _ = newest_good(held.folder.checkpoints)
    kept = f"its checkpoint of step {good.step} is whole" if good else "it had no checkpoint yet, so it will begin anew"
    measured = int(told.measured.get("process_bytes", 0))
    predicted = int(chosen.predicted["process_bytes"])
    most = max(measured, predicted)
    budget = held.request.memory or int(0.9 * memory_free())
    if not chosen.details.looked:
        return (
            f"the run stopped after step {told.step} because {why}; {kept}. It had {bytes_text(measured)} at its last step, and "
            f"nothing can be planned for it: {chosen.basis}"
        )
    said = (
        f"the run stopped after step {told.step} because {why}; {kept}. It was planned for {bytes_text(predicted)} "
        f"and had {bytes_text(measured)} at its last step"
    )
    say(call, "planning again with what was measured …")
    try:
        smaller = int(min(0.9, predicted / most) * min(budget, most))
        asked = PlanOptions(memory=smaller, inexact=held.request.inexact, exact=held.request.exact)
        outcome = plan_job(job, asked, devices=workers.world, here=workers.devices)
    except (Mistake, OverBudget) as error:  # nothing fits, or planning, which trains a few steps, ran out of memory too
        return f"{said}; planning again led to nothing: {error}"
    held.folder.write("plan-next.json", outcome.as_json())
    return (
        f"{said}. A plan with more room is ready, {outcome.chosen} at {bytes_text(outcome.chosen.predicted['process_bytes'])}: "
        f"go on with it by the same command and --run {held.folder.path} --replan"
    )
