"""shoestring plan: what would it take."""
from __future__ import annotations

import sys

from shoestring.commands import DONE
from shoestring.commands.job_flags import asked, job_flags, loaded, planned, reasons, team, team_flags
from shoestring.commands.output import screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

name = "plan"
help = "what would it take: every technique costed, the best plan chosen and explained"


def flags(parser: ArgumentParser) -> None:
    job_flags(parser)
    team_flags(parser)
    parser.add_argument("--hardware", metavar="FILE", help="plan for a cluster that this file describes and that need not be here")
    parser.add_argument("--save", metavar="FILE", help="save the chosen plan")


def run(options: Namespace) -> int:
    given = asked(options)
    import json
    from pathlib import Path

    from shoestring.show.terminal import plan_text

    team(options)
    job = loaded(options, given.path, given.flags)
    chosen, outcome = planned(options, job, given.memory, options.hardware)
    if options.save:
        chosen.save(Path(options.save))
    if not outcome:
        outcome = {"chosen": chosen.as_json()}
    if options.json:
        print(json.dumps(outcome))
    elif "plain" in outcome:
        print(plan_text(outcome, reasons(), screen(sys.stdout)))
    else:
        print(chosen)
    return DONE
