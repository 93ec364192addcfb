"""shoestring plan: what would it take."""

from __future__ import annotations

import sys

from shoestring.commands import DONE
from shoestring.commands.job_flags import asked, job_flags, loaded, planned, reasons, team, team_flags
from shoestring.commands.output import screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from shoestring.core.job import Job

name = "plan"
help = "what would it take: every technique costed, the best plan chosen and explained"


def flags(parser: ArgumentParser) -> None:
    job_flags(parser)
    team_flags(parser)
    parser.add_argument(
        "--hardware", metavar="FILE", help="plan for a cluster that this file describes and that need not be here"
    )
    parser.add_argument("--save", metavar="FILE", help="save the chosen plan")


def run(options: Namespace) -> int:
    given = asked(options)
    import json
    from pathlib import Path

    from shoestring.show.terminal import plan_text

    team(options)
    job = loaded(options, given.path, given.flags)
    chosen, outcome = planned(options, job, given.memory, options.hardware)
    note = weights_note(job)
    if options.save:
        chosen.save(Path(options.save))
    if not outcome:
        outcome = {"chosen": chosen.as_json()}
    if note:
        outcome = {**outcome, "weights": note}
    if options.json:
        print(json.dumps(outcome))
    elif "plain" in outcome:
        print(plan_text(outcome, reasons(), screen(sys.stdout)))
    else:
        print(chosen)
    if note and not options.json:
        print(f"\nweights: {note}")
    return DONE


def weights_note(job: Job) -> str:
    """What of the files that the job's weights come from is taken and what not; empty if that is all of it."""
    if not job.weights:
        return ""
    from shoestring.runs.export import model_of
    from shoestring.runs.initial_weights import source

    found = source(model_of(job.model), job)
    return found.note if found else ""
