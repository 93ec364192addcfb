"""shoestring load: ask a server at a rate, and tell how long answers take."""

from __future__ import annotations

import json
import sys

from shoestring.core.errors import Mistake
from shoestring.core.exit_codes import DONE, FAULT
from shoestring.show.output import say, screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command import Call
    from shoestring.serving.load.options import LoadCommand
    from shoestring.serving.load.outcome import LoadOutcome

MOST_BYTES = 1 << 30  # of a file of bodies


def run(command: LoadCommand, call: Call) -> int:
    import asyncio

    from shoestring.core.codec import to_json
    from shoestring.core.extras import require

    command.check()
    require("serve")
    from shoestring.serving.load.client import LoadTarget, send_all
    from shoestring.serving.load.outcome import due_times, outcome_of
    from shoestring.show.terminal import table

    bodies = bodies_in(command.data)
    due = due_times(float(command.rate), float(command.seconds), int(command.seed))
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {command.token}"} if command.token else {}
    )
    say(call, f"{len(due):,} requests of {len(bodies):,} bodies in {float(command.seconds):g} s …")
    target = LoadTarget(command.url, headers, command.insecure)
    found = outcome_of(asyncio.run(send_all(target, bodies, due, int(command.connections))), float(command.rate))
    if call.json:
        print(json.dumps(to_json(found) | {"answered_rate": found.answered_rate}))
    else:
        print(table(rows(found), screen=screen(sys.stdout)))
    return DONE if found.answered else FAULT


def bodies_in(file: str) -> list[bytes]:
    """The lines of a file."""
    import os
    import stat

    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise Mistake(f"{file} is no file of bodies: give a text file, a JSON body a line")
        with open(file, "rb") as opened:
            bodies = [line.strip() for line in opened if line.strip()]
    except OSError as error:
        raise Mistake(f"{file} can't be read ({error.strerror}): give a file with a JSON body a line") from error
    if not bodies:
        raise Mistake(f'{file} is empty: give a JSON body a line, such as {{"text": "hello"}}')
    return bodies


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
