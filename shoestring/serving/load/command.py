"""shoestring load: ask a server at a rate, and tell how long answers take."""

from __future__ import annotations

import json
import sys

from shoestring.core.command_line.exit_codes import DONE, FAULT
from shoestring.show.output import say, screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command_line.command import Call
    from shoestring.serving.load.options import LoadCommand
    from shoestring.serving.load.outcome import LoadOutcome


def run(command: LoadCommand, call: Call) -> int:
    from shoestring.core.command_line.extras import require
    from shoestring.core.files.codec import to_json

    command.check()
    require("serve")
    from shoestring.serving.load.bodies import bodies_in
    from shoestring.serving.load.library import sent_load
    from shoestring.show.terminal import table

    bodies, seconds = bodies_in(command.data), float(command.seconds)
    say(call, f"{len(bodies):,} bodies, {float(command.rate):g} requests/s at random for {seconds:g} s …")
    found = sent_load(command, bodies)
    if call.json:
        print(json.dumps(to_json(found) | {"answered_rate": found.answered_rate}))
    else:
        print(table(rows(found), screen=screen(sys.stdout)))
    return DONE if found.answered else FAULT


def rows(found: LoadOutcome) -> list[list[str]]:
    """What was found, for a person."""
    from shoestring.core.units import seconds_text

    return [
        ["what", "found"],
        ["asked", f"{found.asked_rate:,.4g} requests/s"],
        ["answered", f"{found.answered:,}, {found.answered_rate:,.4g} requests/s"],
        *(
            ["refused", f"{found.refused:,}, 99 % of them within {seconds_text(found.refusal_seconds)}"]
            for _ in range(min(found.refused, 1))
        ),
        *(["failed", f"{count:,}: {text}"] for text, count in found.errors),
        *([f"{100 * share:g} % within", seconds_text(value)] for share, value in found.percentiles),
    ]
