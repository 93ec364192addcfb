"""shoestring serve: measure a model, choose the best server within a target, and serve."""

from __future__ import annotations

import json
import os
import sys
from functools import partial

from shoestring.core.command_line.exit_codes import DONE
from shoestring.core.errors import Mistake
from shoestring.show.output import say, screen, warn
from shoestring.show.ticker import ticking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command_line.command import Call
    from shoestring.runs.events.event import Event
    from shoestring.serving.loading import ServedSource
    from shoestring.serving.options import ServeCommand
    from shoestring.serving.room import ServingOutcome

LOOKING = "measuring how long the model takes for batches of several sizes …"


def run(command: ServeCommand, call: Call) -> int:
    from shoestring.core.command_line.extras import require

    require("serve")
    command.asked.budget(), command.asked.hourly_price
    check_use(command.asked.use or ())
    source = source_of(command, call)
    from shoestring.serving.serving_run import ServingRun, held_folder, outcome_for
    from shoestring.show.run_end import session_of

    if command.plan_only:
        say(call, LOOKING)
        with ticking("measuring the model"):
            outcome = outcome_for(source, command.asked)
        print(json.dumps(outcome.as_json()) if call.json else text_of(outcome, command))
        return DONE
    with session_of(held_folder(source, command.asked, command.run, command.fresh)) as session:
        say(call, f"the run is kept in {session.folder.path}")
        show = partial(show_plan, call, command)
        run = ServingRun(
            session,
            source,
            command.asked,
            command.listen,
            show,
            partial(on_event, call),
            partial(token_made, call),
            ticking,
        )
        played = session.play(run)
        assert played.ended is not None, "a server is never finished"
        done = played.ended
        if call.json:
            print(json.dumps({"requests": done.requests, "failures": done.failures, "refused": done.refused}))
        else:
            say(call, f"served {done.requests:,} requests, {done.failures:,} failed, {done.refused:,} refused")
    return DONE


def check_use(use: tuple[str, ...]) -> None:
    from shoestring.planning.names import check_written

    for written in use:
        check_written(written, "shoestring.serving")


def check_folder(path: str) -> None:
    """Refuse a folder that has no model."""
    if not any(os.path.exists(os.path.join(path, name)) for name in ("run.json", "manifest.json")):
        raise Mistake(
            f"{path} is no run and no compressed model: give the folder that `train` or `compress` wrote, or a job"
        )


def source_of(command: ServeCommand, call: Call) -> ServedSource:
    """What is to be served; what can be told before torch is imported is told now."""
    from shoestring.jobfile import job_path, parse_flags

    path, flags = command.model, {}
    if os.path.isdir(path):
        check_folder(path)
        if command.job is not None:
            flags = parse_flags(job_path(command.job), call.words, call.own_flags)
        elif call.words:
            raise Mistake(
                f"{call.words[0]!r} is no option of this command; flags of the model's job are given with --job FILE"
            )
    else:
        flags = parse_flags(job_path(path), call.words, call.own_flags)
        path = job_path(path)
    from shoestring.serving.loading import ServedSource

    return ServedSource(path, command.job, flags, command.asked.newest)


def show_plan(call: Call, command: ServeCommand, outcome: ServingOutcome) -> None:
    say(call, text_of(outcome, command))
    warn(outcome.chosen.warnings)


def text_of(outcome: ServingOutcome, command: ServeCommand) -> str:
    from shoestring.serving.text import outcome_text

    return outcome_text(outcome, screen(sys.stderr), command.asked.hourly_price)


def token_made(call: Call, token: str) -> None:
    say(call, f"clients send the header Authorization: Bearer {token}")


def on_event(call: Call, event: Event) -> None:
    """Tell of what happens while it serves."""
    from shoestring.core.units import bytes_text, seconds_text
    from shoestring.runs.events.event import Warned
    from shoestring.serving.events import Listening, Served, ServerChanged

    if isinstance(event, Listening):
        say(call, f"{event.model} answers at {event.url} ({event.replicas} replicas, {bytes_text(event.bytes)})")
    elif isinstance(event, ServerChanged | Warned):
        warn([event.text])
    elif isinstance(event, Served):
        refused = f", {event.refused:,} refused" * bool(event.refused)
        failed = f", {event.failures:,} failed" * bool(event.failures)
        rate = event.requests / event.seconds if event.seconds else 0.0
        say(
            call,
            f"{rate:,.4g} requests/s, half within {seconds_text(event.p50)}, 99 % within {seconds_text(event.p99)}{refused}{failed}",
        )
