"""The library function `shoestring.federate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.core.command_line.options import speaking_of_arguments
from shoestring.core.errors import Mistake
from shoestring.core.files.codec import to_json
from shoestring.core.files.files import temporary_folder
from shoestring.core.job import Job
from shoestring.core.running.random_state import fork_rng as random_state_kept
from shoestring.core.running.signals import deliver
from shoestring.core.technique import text
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.available import available_techniques
from shoestring.federated.room import PlannedFederation
from shoestring.federated.session import FederationRun, Onlooker
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.release import release_of
from shoestring.jobfile import job_path, load_job, resolved_arguments, with_course
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.events.event import Event, Warned
from shoestring.runs.modules import imported_modules
from shoestring.runs.options import RunOptions
from shoestring.runs.request import Request, environment_now, request_for
from shoestring.runs.resume import Resolved, open_run
from shoestring.runs.session import Session
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.show.page import page
from shoestring.show.run_end import check_report

FORGOTTEN = (
    "what this federation spends of epsilon is kept nowhere, so the next one on the same people does not know of it, and its "
    "epsilon is that of itself alone: give ledger=, a file for all runs on them, or run="
)


@dataclass(frozen=True)
class Federated:
    """The result of a federation."""

    model: nn.Module = field(repr=False)  # the job's model with the weights of the last round
    losses: tuple[float, ...]  # mean training loss of every round; NaN: nobody took part
    metrics: tuple[Mapping[str, Any], ...]  # of every validation on the job's held-out data
    before: tuple[Mapping[str, Any], ...]  # held-out metrics on devices before their own training,
    after: tuple[Mapping[str, Any], ...]  # and after it
    report: Mapping[str, Any] = field(repr=False)  # everything that `shoestring federate --json` prints


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restores the script's number of threads; a federation computes with one (`prepare_federation`)."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@speaking_of_arguments()
@random_state_kept()
@threads_kept()
def federate(
    job: Job | str | Path,
    rounds: int | None = None,
    per_round: int | None = None,
    clients: int | None = None,
    *,
    upload: str | int | None = None,
    download: str | int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    time: str | float | None = None,
    statistics: str | None = None,
    use: Iterable[FederatedTechnique | str] | None = None,
    every: int | None = None,
    processes: int | None = None,
    ledger: str | Path | None = None,
    ledger_epsilon: float | None = None,
    insecure_seed: int | None = None,
    run: str | Path | None = None,
    fresh: bool = False,
    adopt: bool = False,
    save_every: int | str = "1m",
    keep: int = 3,
    seed: int | None = None,
    tell: Callable[[Event], None] | None = None,
    **flags: Any,
) -> Federated:
    """Train a job where its records are, on simulated devices.

        done = shoestring.federate(job, rounds=20, per_round=10, upload="20KB")
        print(done.losses[-1], done.report["bytes_up"])

    job         a Job with `clients`, the path of a job file, or the name of a built-in one ("digits"); `flags` are the file's own
    rounds, per_round, clients    number of rounds, of devices that take part in one, and of all devices
    upload, download, time, epsilon, delta    budgets: bytes per device and round, time of all rounds, privacy loss of all rounds
    statistics  of norm layers: "averaged", "local" (every device keeps its own) or "frozen"; default: as the job's Local says
    ledger      the privacy ledger of these people, if other runs use their records too; default: one in the run's folder.
                `ledger_epsilon`: limit for all runs on it together
    insecure_seed    derive the noise from this number, for tests: nothing is private, and the report says so
    use         exactly these techniques instead of choosing: ["FedAdam(lr=0.01)", TopK(share=0.01), MyRule()]; docs/own_technique.md
    every       evaluate the model every so many rounds
    processes   number of processes that simulate devices; the result has the same bits with any number
    run         a folder for the run; an existing run is resumed. Default: nothing is stored. Needs a job from a file
    fresh, adopt    start over in an existing run's folder, or resume it although the request changed
    save_every, keep    how often the run is saved (50 rounds, "5m"), and how many checkpoints are kept
    tell        called with every event

    Raises Mistake if something can't work, and OverBudget if nothing fits.
    """
    asked = FederateOptions.parsed(
        {
            "clients": clients,
            "per_round": per_round,
            "rounds": rounds,
            "upload": upload,
            "download": download,
            "time": time,
            "epsilon": epsilon,
            "delta": delta,
            "statistics": statistics,
            "ledger": ledger,
            "ledger_epsilon": ledger_epsilon,
            "insecure_seed": insecure_seed,
            "every": every,
            "processes": processes,
        }
    )
    asked.check_private()
    kept = RunOptions(run, fresh, adopt, save_every, keep)
    kept.check()
    made = job if isinstance(job, Job) else load_job(job_path(str(job)), flags)
    made = made if seed is None else with_course(made, {"seed": seed})
    used = None if use is None else tuple(use)
    names = None if used is None else tuple(one if isinstance(one, str) else text(one) for one in used)
    offers = available_techniques(one for one in used or () if not isinstance(one, str))
    with ExitStack() as stack:
        folder = Path(run) if run is not None else Path(stack.enter_context(temporary_folder()))
        held = open_run(
            folder,
            replace(request_of(made, names, run), room="federated", asked=to_json(asked)),
            source_of(made),
            fresh,
            adopt,
            resolve=(lambda flags: Resolved(resolved_arguments(made), imported_modules())) if run is not None else None,
        )
        session = stack.enter_context(Session(held, page, by_script=True))

        def warn(planned: PlannedFederation) -> None:
            plan = planned.outcome.chosen
            if run is None and ledger is None and release_of(plan.techniques, planned.given) is not None:
                warnings.warn(FORGOTTEN, stacklevel=8)
            for text in plan.warnings:
                warnings.warn(text, stacklevel=8)
                (tell or silent)(Warned(text))

        played = session.play(
            FederationRun(
                session,
                lambda: made,
                Cadence(seconds=1e9) if run is None else kept.cadence,
                lambda given: nullcontext(Onlooker(tell or silent)),
                show=warn,
                offers=offers,
                adopt=adopt,
            )
        )
        if played.ended is not None and played.ended.stopped:
            deliver(played.ended.signal)
            raise KeyboardInterrupt(played.ended.stopped)  # the script's own handler did not end it
        if played.ended is not None and played.ended.unsaved:
            raise OSError(played.ended.unsaved)
        assert played.report is not None, "it is finished"
        report = played.report
        last, _ = newest_good(held.folder.checkpoints)
        assert last is not None, "the last weights were saved"
        model, weights = fresh_model(made), last.weights()
        model.load_state_dict(
            {name: weights[weights.metadata.get(f"alias {name}", name)] for name in model.state_dict()}
        )
    with check_report(held.folder.path):
        losses = tuple(nan if loss is None else float(loss) for loss in report["losses"])
        metrics, before, after = (tuple(map(dict, report[name])) for name in ("metrics", "before", "after"))
    return Federated(model, losses, metrics, before, after, report)


def silent(event: Event) -> None:
    """Ignores an event."""


def request_of(job: Job, use: tuple[str, ...] | None, run: str | Path | None) -> Request:
    if job.origin is not None:
        return request_for(Path(job.origin.file), dict(job.origin.flags), None, use, False, None)
    if run is not None:
        raise Mistake(
            "--run keeps a federation that can be gone on with later, by whoever has the job's file, and this Job was made in a "
            "script: put it into a file with `def job(...) -> Job`, and give its path"
        )
    return Request(job="script", use=use, environment=environment_now())


def source_of(job: Job) -> bytes:
    return Path(job.origin.file).read_bytes() if job.origin is not None else b""
