"""The report of a run: all that is known of it, folded from its request, its plan and its events. What every page and export shows.

It is the same value while the run goes on and when it is over: the live page is the report of what there is so far. `as_json` is what
`export --to json` writes and the page is drawn from:

    name, run             of the folder
    job, flags, budget    what was asked for; budget has `memory`
    arguments             of the job: all of them, with their final values
    state                 planning, training, stopped, finished, data ended (before the steps that it wanted), failed (it said why) or
                          died (it said nothing)
    pid                   who trains there now, or None
    text                  why it failed, stopped or died, and where it stands
    step, steps           where it is, and where it wants to be
    losses, seconds       of the steps that count, from the first
    step_numbers          their numbers, where they are not 1, 2, 3 and so on: events may be lost
    rates, norms          learning rate and norm of the gradients of each of them, where they are told; None in a step that does not
    borders               [step, rounds of the data that are over after it], of every step that ended a round
    samples_process       [seconds since it was begun, bytes of the process]
    predicted, measured   figures by name; measured so far while it trains
    plain, techniques, blocks, runners_up, exactness, sure    of the plan (missing while it plans)
    weights_sha256, shown, state_of_techniques     at the end
    damage                what of the folder can't be used, and why; also among the events, as warnings
    mesh                  of a group: {"data": 2, "stage": 2, "tensor": 1}, how many workers stand along each axis
    cut, cut_blocks, schedule, pieces, cut_why     of a model that is cut: blocks of every chunk, in order (as many chunks as stages, or a
                          multiple of that), their names, by which schedule, in how many pieces of a batch, and why
    bubble                there: {"predicted", "measured"} share of a step in which workers wait; measured: the median of steps that were
                          not tracked, None while nothing is known
    timeline              there: {"predicted", "measured"} of every stage [[kind, piece, chunk, begin, end]] in seconds; measured of `step`,
                          the last one so far; one_clock: false where machines have no clock in common
    peaks                 there: bytes that the tensors of every worker needed, by rank
    metrics, best         of every validation [{step, epoch, loss, ...}], and the best of them or None
    epochs                rounds of the data that are over
    ended                 why training ended: "steps", "epochs", "data ended", "no better for 3 validations"; "" while it goes on
    checkpoints           [{step, bytes, seconds, time, kept}] as they were saved; kept: it is still on disk
    events                all that happened beside steps, in order
    room                  whose run it is; what only its runs have follows (`RoomPlugin.entries`)
    begun, last, now      seconds since 1970: the first event, the last one, this moment
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

from shoestring.core.budget import Budget
from shoestring.core.codec import finite_json
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in
from shoestring.core.figures import Figures, Quantity
from shoestring.core.rooms import RoomPlugin, room_named
from shoestring.core.units import seconds_text
from shoestring.planning.quantities import MEASURABLE, compared, plan_summary
from shoestring.runs.event import (
    DATA_ENDED,
    Begun,
    Event,
    Failed,
    Finished,
    RoomEvent,
    Saved,
    StageTimes,
    Stopped,
    Validated,
    Warned,
)
from shoestring.runs.events import NAME, record_of
from shoestring.runs.folder import Folder, Unusable, holder
from shoestring.runs.history import History, Steps, best_of, measured, metrics_of
from shoestring.runs.request import Request

E = TypeVar("E", bound=RoomEvent)
ENDS = (Finished, Stopped, Failed)  # events that end a run; what it is then is called as they are


@dataclass(frozen=True)
class Report:
    path: Path  # of the run's folder
    request: Request | None  # None: it can't be read
    plan: Mapping[str, Any]  # what plan.json says; empty while it plans
    ended: Mapping[str, Any]  # what report.json says of a run that is finished; else empty
    state: str  # planning, training, stopped, finished, data ended, failed or died
    pid: int | None  # who trains there now
    text: str  # why it failed, stopped or died, and where it stands
    step: int  # where it is,
    steps: int  # and where it wants to be
    losses: Sequence[float]  # of the steps that count, from the first
    seconds: Sequence[float]
    samples_process: Sequence[tuple[float, int]]  # (seconds since it was begun, bytes of the process)
    measured: Mapping[str, Any]  # figures by name so far, with the moment and the parts of the peak
    damage: tuple[str, ...]  # what of the folder can't be used, and why
    checkpoints: tuple[Saved, ...]
    events: tuple[Event, ...]  # all beside steps and measurements; damage as warnings at the end
    begun: float | None  # seconds since 1970: the first event,
    last: float | None  # the last one,
    now: float  # this moment
    validated: tuple[Validated, ...] = ()  # of the steps that count
    epochs: int = 0  # rounds of the data that are over
    why_ended: str = ""  # "steps", "epochs", "data ended", "no better for 3 validations"; empty: it is not over
    curves: Mapping[str, Sequence[Any]] = field(
        default_factory=dict
    )  # step_numbers, rates, norms and borders, where there are any
    kept: frozenset[str] = frozenset()  # names of the checkpoints that are on disk now
    timed: StageTimes | None = None  # who did what when, where workers hold different layers
    told: Mapping[type[RoomEvent], Sequence[RoomEvent]] = field(
        default_factory=dict
    )  # by its room, of the steps that count
    of_room: Mapping[str, Any] = field(default_factory=dict)  # what only runs of its room have, by key; as JSON
    quantities: tuple[Quantity, ...] = MEASURABLE  # that are predicted and measured of it

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run(self) -> str:
        return str(self.path)

    @property
    def job(self) -> str:
        """Its name, without the folder and .py; a finished run had it as it was typed until 0.1."""
        return Path(self.request.job if self.request else str(self.ended.get("job", ""))).stem

    @property
    def flags(self) -> Mapping[str, Any]:
        return self.request.flags if self.request else {}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Of the job: all of them, with their final values; of a run of a version before, the flags that were given."""
        return (self.request.arguments or self.request.flags) if self.request else {}

    @property
    def budget(self) -> Budget:
        return Budget(memory=self.request.memory if self.request else None)

    @property
    def figures(self) -> Figures:
        """Predicted beside measured."""
        return compared(self.plan_entry("predicted", {}), self.measured, self.basis, self.quantities)

    @property
    def basis(self) -> str:
        """How the predictions are known."""
        return str(self.plan_entry("sure", ""))

    @property
    def plain(self) -> Mapping[str, Any]:
        """The plan without techniques, as JSON."""
        return dict(self.plan_entry("plain", {}))

    @property
    def techniques(self) -> Sequence[Mapping[str, Any]]:
        """Of each: name, knobs, why."""
        return tuple(self.plan_entry("techniques", ()))

    @property
    def blocks(self) -> Sequence[tuple[str, int]]:
        """The highest bytes while each block runs, as predicted."""
        return tuple((name, size) for name, size in self.plan_entry("blocks", ()))

    @property
    def runners_up(self) -> Sequence[Mapping[str, Any]]:
        """Plans that lost, as JSON, with `text` and why they `lost`."""
        return tuple(self.plan_entry("runners_up", ()))

    @property
    def exactness(self) -> Exactness | None:
        return stated_in(dict(self.plan) | dict(self.ended)) if self.plan or self.ended else None

    @property
    def weights_sha256(self) -> str:
        return str(self.ended.get("weights_sha256", ""))

    @property
    def shown(self) -> str:
        return str(self.ended.get("shown", ""))

    @property
    def state_of_techniques(self) -> Mapping[str, Any]:
        return dict(self.ended.get("state_of_techniques", {}))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of every validation: step, epoch and metrics by name."""
        return metrics_of(self.validated)

    @property
    def best(self) -> dict[str, Any] | None:
        """The best of them by the job's goal."""
        found = best_of(self.validated)
        return metrics_of([found])[0] if found else None

    def of_kind(self, kind: type[E]) -> list[E]:
        """What its room told of the steps that count, by one kind of its events."""
        return [one for one in self.told.get(kind, ()) if isinstance(one, kind)]

    def cut(self) -> dict[str, Any]:
        """How workers stand and where the model is cut, as predicted and as measured so far: what `train --json` tells of it. Of a
        group the mesh; the rest of a model that is cut."""
        found = {
            name: self.plan[name]
            for name in ("mesh", "cut", "cut_blocks", "schedule", "pieces", "cut_why")
            if name in self.plan
        }
        if "cut" not in found:
            return found
        measured = (
            {"bubble": self.timed.idle, "timeline": [list(map(list, own)) for own in self.timed.timeline]}
            if self.timed
            else {}
        )
        for name in ("bubble", "timeline"):
            found[name] = {"predicted": self.plan.get(name, {}).get("predicted"), "measured": measured.get(name)}
        if self.timed is not None:
            found["timeline"] |= {
                "step": self.timed.step,
                "steps": self.timed.steps,
                "one_clock": not self.timed.machines,
            }
            found["peaks"] = list(self.timed.peaks)
        return found

    def plan_entry(self, name: str, missing: Any) -> Any:
        """An entry of the plan: from the report of a run that has ended, else from its plan.json."""
        return self.ended.get(name, self.plan.get(name, missing))

    def as_json(self) -> dict[str, Any]:
        told = {
            "name": self.name,
            "run": self.run,
            "job": self.job,
            "flags": dict(self.flags),
            "arguments": dict(self.arguments),
            "budget": {"memory": self.budget.memory},
            "state": self.state,
            "pid": self.pid,
            "text": self.text,
            "step": self.step,
            "steps": self.steps,
            "losses": finite_json(list(self.losses)),
            "seconds": list(self.seconds),
            "samples_process": list(self.samples_process),
            "checkpoints": [record_of(one) | {"kept": one.checkpoint in self.kept} for one in self.checkpoints],
            "damage": list(self.damage),
            "metrics": self.metrics,
            "best": self.best,
            "epochs": self.epochs,
            "ended": self.why_ended,
            "events": list(map(record_of, self.events)),
            "begun": self.begun,
            "last": self.last,
            "now": self.now,
            **self.curves,
        }
        if self.request is not None:
            told |= {"room": self.request.room, **self.of_room}
        return (
            told
            | ({"measured": dict(self.measured)} if self.measured else {})
            | dict(self.plan)
            | self.cut()
            | dict(self.ended)
            | {"job": self.job}
        )


def report_of(path: Path, history: History | None = None) -> Report:
    """The report of the run in a folder; `history` if its events were read already. What is damaged is left out and told of."""
    folder = Folder(path)
    request, plan, ended, damage = read_files(folder)
    history = history or History().read(path)
    steps, doing, pid = history.steps, history.doing, holder(path)
    room, missing = room_of(request)
    quantities = room.quantities() or MEASURABLE
    entries, failed = entries_of(room, request, history, folder)
    alive = "training" if isinstance(doing, Begun) else "planning"
    state = doing.kind if isinstance(doing, ENDS) else alive if pid is not None else "died"
    if isinstance(doing, Finished) and doing.ended == DATA_ENDED:
        state = DATA_ENDED
    damage += (
        missing
        + failed
        + [history.wrong] * bool(history.wrong)
        + lost(history.damaged + (pid is None and history.rest > 0))
    )
    return Report(
        path,
        request,
        plan_summary(plan, quantities),
        ended if isinstance(doing, Finished) else {},
        state,
        pid,
        text_of(state, history, pid, room.counts),
        steps.number[-1] if steps else 0,
        history.wanted,
        list(steps.loss),
        list(steps.seconds),
        [(when - (history.begun or 0.0), size) for when, size in zip(steps.time, steps.process, strict=True)],
        measured(history),
        tuple(damage),
        tuple(history.saved),
        (*history.others, *(Warned(one, time=history.last or time.time()) for one in damage)),
        history.begun,
        history.last,
        time.time(),
        tuple(history.validated),
        steps.epoch[-1] if steps else 0,
        doing.ended if isinstance(doing, Finished) else "",
        curves_of(steps),
        checkpoints_in(folder),
        history.timed,
        history.told,
        entries,
        quantities,
    )


def curves_of(steps: Steps) -> dict[str, Sequence[Any]]:
    """What only some runs tell of their steps, by its name in the report."""
    found: dict[str, Sequence[Any]] = {}
    if steps and (steps.number[0] != 1 or steps.number[-1] != len(steps)):
        found["step_numbers"] = list(steps.number)
    for name, column in (("rates", steps.rate), ("norms", steps.norm)):
        if not all(map(isnan, column)):
            found[name] = [None if isnan(value) else value for value in column]
    ends = [
        (step, after)
        for step, before, after in zip(steps.number, (0, *steps.epoch), steps.epoch, strict=False)
        if after > before
    ]
    return found | ({"borders": ends} if ends else {})


def room_of(request: Request | None) -> tuple[RoomPlugin, list[str]]:
    """The room of a run, and what is wrong with it; where it is not known, one that adds nothing."""
    try:
        return (RoomPlugin() if request is None else room_named(request.room)), []
    except Mistake as error:
        return RoomPlugin(), [str(error)]


def entries_of(
    room: RoomPlugin, request: Request | None, history: History, folder: Folder
) -> tuple[Mapping[str, Any], list[str]]:
    """What only runs of its room have, and why that can't be told: no room takes a report down."""
    try:
        return (room.entries(request, history, folder) if request is not None else {}), []
    except (Exception, SystemExit) as error:
        return {}, [f"what the room {room.name} tells of it can't be made: {type(error).__name__}: {error}"]


def checkpoints_in(folder: Folder) -> frozenset[str]:
    """The names of a run's checkpoints that are there now."""
    try:
        return frozenset(os.listdir(folder.checkpoints))
    except OSError:
        return frozenset()


def read_files(folder: Folder) -> tuple[Request | None, dict[str, Any], dict[str, Any], list[str]]:
    """The request, the plan and the report of a run, empty where they can't be used, and why they can't."""
    request, others, wrong = None, {}, []
    try:
        request = folder.request()
    except Unusable as error:
        wrong.append(str(error))
    for name in ("plan.json", "report.json"):
        try:
            others[name] = folder.read(name)
        except Unusable as error:
            wrong.append(str(error))
    return request, others.get("plan.json", {}), others.get("report.json", {}), wrong


def text_of(state: str, history: History, pid: int | None, unit: str = "step") -> str:
    """Why a run stands where it does, as far as there is something to say."""
    steps, doing = history.steps, history.doing
    if state == "died":
        stood = (
            f"It stood at {unit} {steps.number[-1] if steps else 0} of {history.wanted}"
            if history.wanted
            else "It was still planning"
        )
        return f"The process is gone and said nothing: it was killed, or the machine went down. {stood}" + (
            f" and can go on from {unit} {history.saved[-1].step} by the same command."
            if history.saved
            else "; no checkpoint was saved yet."
        )
    if state == "training" and steps and history.last is not None:
        return silence(time.time() - history.last, list(steps.seconds[-20:]), pid, unit)
    text = doing.text if isinstance(doing, (Stopped, Failed)) else ""
    return text[:1].upper() + text[1:]


def lost(lines: int) -> list[str]:
    """What to say of damaged lines."""
    if not lines:
        return []
    many = f"{lines:,} lines of {NAME} are" if lines > 1 else f"1 line of {NAME} is"
    return [f"{many} damaged and left out: what happened then is missing here; the weights do not depend on it"]


def silence(seconds: float, paces: list[float], pid: int | None, unit: str = "step") -> str:
    """What to say of a run that goes on and has said nothing for so long; nothing if that is usual."""
    if seconds < max(30.0, 10 * max(paces[-20:])):
        return ""
    return f"No {unit} for {seconds_text(seconds)}, though its process {pid} is there: it may hang, be suspended, or wait for its data."
