"""shoestring verify: compare plain training with a plan."""

from __future__ import annotations

import sys

from shoestring.core.command_line.exit_codes import DONE, NOT_KEPT
from shoestring.core.exactness import Exactness, stated_in
from shoestring.show.output import say, screen
from shoestring.training.commands.job_flags import asked_job, load_job, plan_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.training.options import VerifyCommand

VERDICTS = {True: "kept", False: "NOT KEPT", None: "not checked"}


def run(asked: VerifyCommand, call: Call) -> int:
    asked.check()
    given = asked_job(call, asked.job, asked.course.values)
    import json

    from shoestring.processes.nodes import Team
    from shoestring.training.execution.verification import verify_plan

    job = load_job(call, given.path, given.flags)
    chosen = plan_for(call, job, asked.plan, Team()).chosen
    say(call, f"training {asked.check_steps} steps plainly and with {chosen} …")
    report = verify_plan(job, chosen, asked.check_steps)
    if call.json:
        print(json.dumps(report))
    else:
        show(report, asked.check_steps)
    return DONE if report["kept"] else NOT_KEPT


def show(report: dict[str, Any], steps: int) -> None:
    from shoestring.planning.quantities import compare_figures
    from shoestring.show.terminal import beside, table
    from shoestring.training.execution.verification import ROUNDED

    same = Exactness.BITS.word
    rows = [["", "weights", "largest difference", "losses off by", "stated", "verdict"]]
    rows += [
        [
            one["technique"],
            same if one["bit_equal"] else f"not the {same}",
            f"{one['largest_difference']:.2g}",
            f"{one['loss_difference']:.1g}",
            one["stated"],
            VERDICTS[one["kept"]],
        ]
        for one in report["verdicts"]
    ]
    print(table(rows, right=(2, 3), screen=screen(sys.stdout)))
    level = stated_in(report)
    print(f"\nthe plan states {level.word}: {level.meaning}" if level is not None else "")
    print(
        f"{Exactness.ROUNDING.word}: losses within {ROUNDED:.2%}; of {Exactness.DISTRIBUTION.word} and {Exactness.CHANGED.word}, nothing "
        f"is promised that {steps} steps could show"
    )
    print("", beside(compare_figures(report["predicted"], report["measured"]), screen(sys.stdout)), "", sep="\n")
    print("losses, plain and planned:")
    print("\n".join(f"  {plain:.6f}  {planned:.6f}" for plain, planned in report["losses"]))
