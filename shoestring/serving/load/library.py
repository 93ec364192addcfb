"""The library function `shoestring.load_test`; `shoestring load` is the command."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shoestring.core.command_line.extras import require
from shoestring.core.command_line.options import speaking_of_arguments
from shoestring.serving.load.bodies import bodies_in
from shoestring.serving.load.options import LoadCommand
from shoestring.serving.load.outcome import LoadOutcome, due_times, outcome_of


@speaking_of_arguments()
def load_test(
    url: str,
    data: str | Path,
    *,
    rate: str | float = 10.0,
    seconds: str | float = 10.0,
    connections: str | int = 256,
    token: str | None = None,
    insecure: bool = False,
    seed: str | int = 0,
) -> LoadOutcome:
    """Ask a server at a rate, and measure how long answers take, from when each request was due.

        found = shoestring.load_test("http://127.0.0.1:8000/answer", "bodies.jsonl", rate=100)
        print(found.answered_rate, dict(found.percentiles)[0.99])

    url         where requests are posted
    data        a file with a body a line, sent one after the other and again from the first
    rate, seconds    requests a second, which come at random, and how long they come; `seed` of these times
    connections most connections
    token       sent as Authorization: Bearer TOKEN; insecure: believe any certificate

    Raises Mistake if something can't work.
    """
    asked = LoadCommand(url, str(data), rate, seconds, connections, token, insecure, seed)
    asked.check()
    require("serve")
    return sent_load(asked, bodies_in(asked.data))


def sent_load(asked: LoadCommand, bodies: list[bytes]) -> LoadOutcome:
    """Send all requests of a load test."""
    from shoestring.serving.load.client import LoadTarget, send_all

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {asked.token}"} if asked.token else {})
    target = LoadTarget(asked.url, headers, asked.insecure)
    due = due_times(float(asked.rate), float(asked.seconds), int(asked.seed))
    return outcome_of(asyncio.run(send_all(target, bodies, due, int(asked.connections))), float(asked.rate))
