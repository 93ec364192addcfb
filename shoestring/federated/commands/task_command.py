"""Tasks of `federate` other than training: evaluate and tune on devices' own records, and compare two models there."""

from __future__ import annotations

import sys

from shoestring.core.command_line.exit_codes import DONE
from shoestring.core.errors import Mistake
from shoestring.show.output import say, screen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.federated.options import FederateCommand, FederateOptions


def check_task(command: FederateCommand) -> None:
    """Refuse contradicting flags before anything heavy is imported."""
    options, private = command.tasks, command.asked
    given = {
        "--settings": options.settings,
        "--model": options.model,
        "--halving": options.halving,
        "--apart": options.apart,
        "--as-is": options.as_is,
        "--least": options.least,
    }
    meant = {
        "train": (),
        "evaluate": ("--settings", "--model", "--as-is", "--least"),
        "tune": ("--settings", "--model", "--halving", "--least"),
        "compare": ("--settings", "--model", "--as-is", "--apart", "--least"),
    }
    for flag, value in given.items():
        if value and flag not in meant[options.task]:
            others = [task for task, flags in meant.items() if flag in flags]
            raise Mistake(f"{flag} is for --task {' or '.join(others)}, and this is {options.task}")
    if options.task == "tune" and not options.settings:
        raise Mistake('--task tune needs settings to choose among: --settings "lr=0.01,0.1,1"')
    of_training = {
        "--epsilon": private.epsilon,
        "--delta": private.delta,
        "--ledger-epsilon": private.ledger_epsilon,
        "--insecure-seed": private.insecure_seed,
    }
    if options.task != "train" and (given_too := [flag for flag, value in of_training.items() if value is not None]):
        raise Mistake(
            f"{' and '.join(given_too)} {'are' if len(given_too) > 1 else 'is'} for --task train, and this is {options.task}: "
            f"what devices tell in a task has no noise, and is protected by how many they are (--least)"
        )
    if options.task != "train" and (command.use or command.run.run):
        raise Mistake(
            f"--use and --run are for --task train, and this is {options.task}: its result is printed (--json)"
        )


def run_task(command: FederateCommand, call: Call, job: Job, asked: FederateOptions) -> int:
    import json
    from dataclasses import replace

    from shoestring.core.files.codec import finite_json
    from shoestring.federated.planning.prepare import prepare_federation
    from shoestring.federated.session import blaming_the_job
    from shoestring.federated.tasks.compare import Comparison
    from shoestring.federated.tasks.from_options import (
        candidates_of,
        cohort_of,
        draw_devices,
        keep_comparison,
        models_of,
        registry_of,
        task_of,
    )
    from shoestring.federated.tasks.perform import perform_task
    from shoestring.federated.tasks.privacy.release import LEAST
    from shoestring.federated.tasks.settings import settings_of
    from shoestring.federated.tasks.text import result_text

    options = command.tasks
    settings: list[Any] = list(settings_of(options.settings)) if options.settings else [{}]
    say(call, "inspecting the clients and timing devices' work …")
    with blaming_the_job():
        given = prepare_federation(job, replace(asked, per_round=None))
    models = models_of(given, options.model or [])
    candidates = candidates_of(settings, list(models), not options.as_is)
    if options.task == "compare" and len(candidates) != 2:
        raise Mistake(
            f"--task compare is about two models or two settings, and these are {len(candidates)}: give --model A --model B, or "
            f'--settings "lr=0.1,0.01"'
        )
    names = draw_devices(given, asked.per_round)
    task = task_of(
        options.task, job, candidates, models, options.least or LEAST, halving=options.halving, apart=options.apart
    )
    registry = registry_of(job, asked.ledger)
    say(
        call,
        f"which devices something is told about is kept in {registry.path}, so that no two results differ by a few of them",
    )
    found = perform_task(task, cohort_of(given, models, registry), names)
    if isinstance(found, Comparison) and options.model is not None and len(options.model) == 2:
        keep_comparison(options.model[1], found)
    print(json.dumps(finite_json(found.as_json())) if call.json else result_text(found, screen(sys.stdout)))
    return DONE
