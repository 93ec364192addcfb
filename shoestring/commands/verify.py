"""shoestring verify: plain training and the plan side by side."""

from __future__ import annotations

import sys

from shoestring.commands import DONE, NOT_KEPT
from shoestring.commands.job_flags import asked, job_flags, loaded, planned
from shoestring.commands.output import say, screen
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any

name = "verify"
help = "plain training and the plan side by side, from the same seed: the same weights?"
VERDICTS = {True: "kept", False: "NOT KEPT", None: "not checked"}


def flags(parser: ArgumentParser) -> None:
    job_flags(parser)
    parser.add_argument("--check-steps", type=int, default=5, metavar="N", help="steps to compare (default 5)")


def run(options: Namespace) -> int:
    given = asked(options)
    if options.check_steps < 1:
        raise Mistake(f"--check-steps {options.check_steps}: compare at least one step")
    import json

    from shoestring.training.execution.verification import verify_plan

    job = loaded(options, given.path, given.flags)
    chosen, _ = planned(options, job, given.memory)
    say(options, f"training {options.check_steps} steps plainly and with {chosen} …")
    report = verify_plan(job, chosen, options.check_steps)
    if options.json:
        print(json.dumps(report))
    else:
        show(report, options.check_steps)
    return DONE if report["kept"] else NOT_KEPT


def show(report: dict[str, Any], steps: int) -> None:
    from shoestring.planning.quantities import compared
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
    print("", beside(compared(report["predicted"], report["measured"]), screen(sys.stdout)), "", sep="\n")
    print("losses, plain and planned:")
    print("\n".join(f"  {plain:.6f}  {planned:.6f}" for plain, planned in report["losses"]))
