"""A server as a run in a folder: measured and planned once, then served until it is asked to stop. The same command serves again by
the kept plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from shoestring.core.technique import technique_from
from shoestring.core.units import bytes_text
from shoestring.jobfile import job_path
from shoestring.planning.plan import read_plan
from shoestring.processes.launch import run_worker
from shoestring.runs.events.event import Begun, Event, Planning, Stopped, Warned
from shoestring.runs.events.event_log import Events, note
from shoestring.runs.request import request_for
from shoestring.runs.resume import OpenedRun, open_run
from shoestring.runs.session import Execution, Session
from shoestring.serving.batching.admission import AffineTime
from shoestring.serving.catalogue import CATALOGUE
from shoestring.serving.events import Listening, Served, ServerChanged
from shoestring.serving.loading import ServedSource, job_of, onnx_engine, torch_engine
from shoestring.serving.measuring.calibrate import CalibrateTask
from shoestring.serving.measuring.evidence import ONNX_INT8, TORCH
from shoestring.serving.measuring.service_time import ServiceTime
from shoestring.serving.options import ListenOptions, ServeOptions
from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.server import Server, serve
from shoestring.serving.replicas.happenings import Happening, LoadFailed, ModelProcessDied, ReplicaDied, ServedFigures
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.room import QUANTITIES, ServingDetails, ServingOutcome, ServingPlan, deployment_of, plan_serving
from shoestring.serving.technique import ServingCost

Tell = Callable[[str], None]
BUSY = 0.3  # share of the time without a core while measuring, above which the user is told


def held_folder(source: ServedSource, asked: ServeOptions, run: str | Path | None, fresh: bool) -> OpenedRun:
    """The folder of a server, locked: a new one, or the one that is there if the same is asked for."""
    file = Path(job_path(source.job) if source.job else source.path)
    file = file if file.is_file() else file / "job.py"
    content = file.read_bytes() if file.is_file() else b""
    request = replace(
        request_for(file, dict(source.flags), None, asked.use, False, None),
        room="serving",
        asked=asked.as_asked() | {"model": os.path.realpath(source.path)},
    )
    return open_run(Path(run or f"runs/{source.name}-serving"), request, content, fresh, adopt=True)


@dataclass(frozen=True)
class ServingResult:
    """A server that was stopped. The same command serves on, so it is never finished."""

    requests: int
    failures: int
    refused: int
    unfinished: ClassVar[bool] = True


@dataclass
class ServingRun(Execution[ServingPlan, ServingResult]):
    session: Session
    source: ServedSource
    asked: ServeOptions
    listen: ListenOptions
    show: Callable[[ServingOutcome], None] = lambda outcome: None
    heard: Callable[[Event], None] = lambda event: None  # to whoever looks on
    secret: Tell = lambda token: None  # is told the token that was made for clients, which no file keeps
    doing: Callable[[str], AbstractContextManager[object]] = nullcontext  # is entered while something takes long

    @property
    def folder(self) -> Path:
        return self.session.folder.path

    def begin(self) -> None:
        note(self.folder, Planning())

    def read_plan(self, file: Mapping[str, Any]) -> ServingPlan:
        return read_plan(file, lambda name, knobs: technique_from(name, knobs, CATALOGUE), QUANTITIES, ServingDetails)

    def choose(self) -> ServingOutcome:
        with self.doing("measuring the model"):
            return outcome_for(self.source, self.asked)

    def note_plan(self, outcome: ServingOutcome) -> None:
        self.show(outcome)

    def execute(self, plan: ServingPlan) -> ServingResult:
        """Serve until a signal asks to stop."""
        events, counts = Events(self.folder), ServingResult(0, 0, 0)

        def tell(one: Event) -> None:
            self.heard(events.add(one))

        def on_happening(one: Happening) -> None:
            nonlocal counts
            if isinstance(one, ServedFigures):
                counts = ServingResult(
                    counts.requests + one.requests, counts.failures + one.failures, counts.refused + one.refused
                )
                tell(served_event(one))
            elif (text := process_change_text(one)) is not None:
                tell(ServerChanged(text=text))

        def on_listening(server: Server) -> None:
            tell(Begun(pid=os.getpid(), steps=0, step=0, how=str(plan)))
            held, most = bytes_of_tree(os.getpid()), self.asked.budget().memory
            if most is not None and held > most:
                tell(Warned(f"all processes together have {bytes_text(held)}, more than {bytes_text(most)}"))
            if server.token and self.listen.token is None:
                self.secret(server.token)
            url = server.url.partition("?")[0]
            tell(Listening(url=url, model=name, replicas=deployment_of(plan).replicas, bytes=held))

        name = self.listen.name or self.source.name
        serve(
            {name: spec_of(self.source, plan, self.asked, self.folder)},
            config_of(self.listen),
            on_happening,
            on_listening,
        )
        tell(Stopped(text="it was asked to stop"))
        return counts

    def report(self, plan: ServingPlan, ended: ServingResult) -> Mapping[str, Any]:
        raise AssertionError("a server is never finished")


def outcome_for(source: ServedSource, asked: ServeOptions) -> ServingOutcome:
    """Measure what is served, and choose how. Raises OverBudget with the nearest."""
    evidence = run_worker(CalibrateTask(**source.arguments, cores=os.cpu_count() or 1), {})
    cost = ServingCost(evidence, asked.budget())
    found = plan_serving(cost, asked.use)
    if evidence.load <= BUSY:
        return found
    told = f"the machine was busy while the model was measured: {evidence.load:.0%} of the time no core was free"
    return replace(found, chosen=replace(found.chosen, warnings=(*found.chosen.warnings, told)))


def spec_of(source: ServedSource, plan: ServingPlan, asked: ServeOptions, folder: Path) -> ModelSpec:
    one, budget = deployment_of(plan), asked.budget()
    own: dict[str, Any] = {"pack": one.batching.packed}
    if one.engine != TORCH:
        own = {"file": str(folder / f"{one.engine}.onnx"), "int8": one.engine == ONNX_INT8}
    return ModelSpec(
        load=torch_engine if one.engine == TORCH else onnx_engine,
        arguments={**source.arguments, **own},
        batching=one.batching,
        replicas=one.replicas,
        answer=job_of(source).answer,
        time=affine(plan.details.time, plan.details.longest),
        target=budget.latency or inf,
    )


def affine(time: ServiceTime, longest: int) -> AffineTime:
    """The time of a batch by its rows and positions alone; attention counts as in the longest request."""
    return AffineTime(time.batch, time.row, time.token + time.pair * longest)


def config_of(listen: ListenOptions) -> ServerConfig:
    return ServerConfig(
        host=listen.host,
        port=int(listen.port),
        token=listen.token,
        certificate=listen.certificate or "",
        key=listen.key or "",
    )


def served_event(one: ServedFigures) -> Served:
    return Served(
        seconds=one.seconds,
        requests=one.requests,
        failures=one.failures,
        refused=one.refused,
        p50=one.p50,
        p99=one.p99,
        queue=one.queue,
    )


def process_change_text(one: Happening) -> str | None:
    """What happened to a process, in words; None: nothing that a run keeps."""
    if isinstance(one, ReplicaDied):
        given_up = f", {one.given_up} of them given up" if one.given_up else ""
        return f"replica {one.pid} died; {one.waiting_again} requests wait again{given_up}"
    if isinstance(one, ModelProcessDied):
        return f"the model process died ({one.how}); another one loads"
    if isinstance(one, LoadFailed):
        return f"loading failed: {one.why}"
    return None


def bytes_of_tree(pid: int) -> int:
    """Memory of a process and all below it; what several share is counted once."""
    total = 0
    for one in (pid, *children(pid)):
        try:
            with open(f"/proc/{one}/smaps_rollup", encoding="ascii") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue  # it ended meanwhile
    return total


def children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        return []
    return found + [below for one in found for below in children(one)]
