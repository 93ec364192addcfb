"""shoestring plan: show the best plan for a job and a budget."""

from __future__ import annotations

import os
import sys

from shoestring.core.command_line.exit_codes import DONE
from shoestring.show.output import screen
from shoestring.training.commands.job_flags import asked_job, load_job, plan_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.training.options import PlanCommand


def run(asked: PlanCommand, call: Call) -> int:
    asked.plan.check()
    given = asked_job(call, asked.job, asked.course.values)
    team = asked.workers.team(os.environ)
    import json
    from pathlib import Path

    from shoestring.training.report.outcome_text import training_outcome_text

    job = load_job(call, given.path, given.flags)
    outcome = plan_for(call, job, asked.plan, team, asked.hardware)
    note = weights_note(job)
    if asked.save:
        outcome.chosen.save(Path(asked.save))
    if call.json:
        print(json.dumps(outcome.as_json() | ({"weights": note} if note else {})))
    elif outcome.plain is not None:
        print(training_outcome_text(outcome, screen(sys.stdout)))
    else:
        print(outcome.chosen)
    if note and not call.json:
        print(f"\nweights: {note}")
    return DONE


def weights_note(job: Job) -> str:
    """Which of the job's weights come from its files and which do not; empty if all do."""
    if not job.weights:
        return ""
    from shoestring.runs.reports.export import model_of
    from shoestring.runs.weights.initial_weights import source

    found = source(model_of(job.model), job)
    return found.note if found else ""
