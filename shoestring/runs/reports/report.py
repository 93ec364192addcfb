"""The report of a run: everything known about it, folded from request, plan and events. All pages and exports show it.

It is the same value while the run goes on and when it is over: the live page is the report of what there is so far. Nobody who is handed
one has to ask what is in it: events are checked line by line when they are read, plan.json and report.json by the codec. What of them
does not fit is left out and told of as damage; no damaged run takes a page down (tests/show/watch/test_server.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Figures, Quantity
from shoestring.core.files.codec import Unreadable, from_json
from shoestring.core.rooms import RoomPlugin, room_named
from shoestring.core.units import seconds_text
from shoestring.planning.quantities import MEASURABLE, compare_figures
from shoestring.runs.events.event import (
    DATA_ENDED,
    Begun,
    Event,
    Failed,
    Finished,
    Measured,
    RoomEvent,
    Saved,
    StageTimes,
    Stopped,
    Validated,
    Warned,
)
from shoestring.runs.events.event_log import NAME
from shoestring.runs.events.history import History, best_of, largest_life, measured_figures
from shoestring.runs.folder import Folder, Unusable, holder
from shoestring.runs.reports.plan_summary import PlanSummary, read_summary
from shoestring.runs.request import Request

E = TypeVar("E", bound=RoomEvent)
T = TypeVar("T")
NO_PLAN = PlanSummary()
ENDS = (Finished, Stopped, Failed)  # events that end a run; its state is named after them


@dataclass(frozen=True)
class Curves:
    """The numbers of the steps that count, in columns."""

    numbers: Sequence[int] = ()  # step numbers: 1, 2, 3 and so on, unless events are lost
    losses: Sequence[float] = ()  # NaN where there was none
    seconds: Sequence[float] = ()
    rates: Sequence[float] = ()  # learning rates, and gradient norms; empty: not recorded,
    norms: Sequence[float] = ()  # NaN: not recorded for this step
    borders: Sequence[tuple[int, int]] = ()  # (step, completed epochs) where an epoch ended
    process: Sequence[tuple[float, int]] = ()  # (seconds since the start, bytes of the process)


@dataclass(frozen=True)
class RunResult:
    """What a finished run's report.json has besides plan and events."""

    weights_sha256: str = ""
    shown: str = ""  # what the job has to show for it


@dataclass(frozen=True)
class Report:
    path: Path = Path()  # the run's folder
    request: Request | None = None  # None: unreadable
    plan: PlanSummary = NO_PLAN
    result: RunResult | None = None  # None: it is not finished
    state: str = ""  # planning, running, stopped, finished, data ended, failed or died; empty: not known yet
    pid: int | None = None  # who trains there now
    text: str = ""  # why it failed, stopped or died, and where it stands
    step: int = 0  # where it is,
    steps: int = 0  # and where it wants to be; 0: not known
    epochs: int = 0  # rounds of the data that are over
    why_ended: str = ""  # "steps", "epochs", "data ended", "no better for 3 validations"; empty: it is not over
    curves: Curves = Curves()
    validated: Sequence[Validated] = ()  # of the steps that count
    measured: Mapping[str, float] = field(default_factory=dict)  # figures by name so far
    largest: Measured | None = None  # the life with the highest tensor peak: when the peak was, and what it consists of
    timed: StageTimes | None = None  # the timeline of workers that hold different layers
    checkpoints: Sequence[Saved] = ()
    kept: frozenset[str] = frozenset()  # names of the checkpoints that exist now
    events: Sequence[Event] = ()  # all but steps and measurements; damage is added as warnings at the end
    damage: Sequence[str] = ()  # files or lines that can't be used, and why
    begun: float | None = None  # seconds since 1970: the first event,
    last: float | None = None  # the last event,
    now: float = 0.0  # and now
    told: Mapping[type[RoomEvent], Sequence[RoomEvent]] = field(
        default_factory=dict
    )  # by its room, about the steps that count
    of_room: Any = None  # the room's own part (`RoomPlugin.part`)
    quantities: tuple[Quantity, ...] = MEASURABLE  # quantities that are predicted and measured

    @property
    def job(self) -> str:
        """The job's name, without folder and .py."""
        return Path(self.request.job).stem if self.request else ""

    @property
    def room(self) -> str:
        return self.request.room if self.request else ""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """All arguments of the job with their final values; for runs of earlier versions, the flags that were given."""
        return (self.request.arguments or self.request.flags) if self.request else {}

    @property
    def memory(self) -> int | None:
        """Bytes of the budget."""
        return self.request.memory if self.request else None

    @property
    def figures(self) -> Figures:
        """Predicted and measured figures."""
        return compare_figures(self.plan.predicted, self.measured, self.plan.basis, self.quantities)

    @property
    def exactness(self) -> Exactness | None:
        return self.plan.exactness

    @property
    def weights_sha256(self) -> str:
        return self.result.weights_sha256 if self.result else ""

    @property
    def best(self) -> Validated | None:
        """The best validation by the job's goal."""
        return best_of(self.validated)

    def of_kind(self, kind: type[E]) -> list[E]:
        """Its room's events of one kind about the steps that count."""
        return [one for one in self.told.get(kind, ()) if isinstance(one, kind)]


def report_of(path: Path, history: History | None = None) -> Report:
    """The report of the run in a folder; pass `history` if its events were already read. Damaged parts are left out and
    listed."""
    folder, damage = Folder(path), list[str]()
    request = usable(folder.request, damage)
    room = (
        usable(lambda: room_named(request.room) if request is not None and request.room else RoomPlugin(), damage)
        or RoomPlugin()
    )
    quantities = room.quantities() or MEASURABLE
    history = history or History().read(path)
    steps, doing, pid = history.steps, history.doing, holder(path)
    plan, result = usable_files(folder, quantities, isinstance(doing, Finished), damage)
    alive = "running" if isinstance(doing, Begun) else "planning"
    state = doing.kind if isinstance(doing, ENDS) else alive if pid is not None else "died"
    if isinstance(doing, Finished) and doing.ended == DATA_ENDED:
        state = DATA_ENDED
    of_room = part_of(room, request, history, folder, damage)
    damage += [history.wrong] * bool(history.wrong) + damage_remark(
        history.damaged + (pid is None and history.rest > 0)
    )
    return Report(
        path=path,
        request=request,
        plan=plan,
        result=result,
        state=state,
        pid=pid,
        text=text_of(state, history, pid, room.counts),
        step=steps.number[-1] if steps else 0,
        steps=history.wanted,
        epochs=steps.epoch[-1] if steps else 0,
        why_ended=doing.ended if isinstance(doing, Finished) else "",
        curves=curves_of(history),
        validated=tuple(history.validated),
        measured=measured_figures(history),
        largest=largest_life(history),
        timed=history.timed,
        checkpoints=tuple(history.saved),
        kept=checkpoints_in(folder),
        events=(*history.others, *(Warned(one, time=history.last or time.time()) for one in damage)),
        damage=tuple(damage),
        begun=history.begun,
        last=history.last,
        now=time.time(),
        told=history.told,
        of_room=of_room,
        quantities=quantities,
    )


def usable(read: Callable[[], T], damage: list[str]) -> T | None:
    """The value that `read` returns; None if it fails, and the reason is added to `damage`."""
    try:
        return read()
    except Mistake as error:
        damage.append(str(error))
        return None


def usable_files(
    folder: Folder, quantities: tuple[Quantity, ...], finished: bool, damage: list[str]
) -> tuple[PlanSummary, RunResult | None]:
    """The run's plan and, if it is finished, the rest of its report.json; unusable parts of both files are left out."""
    file, ended = (usable(partial(folder.read, name), damage) or {} for name in ("plan.json", "report.json"))
    plan, result = NO_PLAN, None
    try:
        plan = read_summary(file, {}, quantities)
    except Unreadable as error:
        damage.append(str(folder.unusable("plan.json", error)))
        file = {}
    try:
        if ended and finished:
            result = from_json(RunResult, ended, unknown="ignored")
            plan = read_summary(file, ended, quantities)
    except Unreadable as error:
        damage.append(str(folder.unusable("report.json", error)))
    return plan, result


def curves_of(history: History) -> Curves:
    steps, begun = history.steps, history.begun or 0.0
    ends = zip(steps.number, (0, *steps.epoch), steps.epoch, strict=False)
    return Curves(
        list(steps.number),
        list(steps.loss),
        list(steps.seconds),
        [] if all(map(isnan, steps.rate)) else list(steps.rate),
        [] if all(map(isnan, steps.norm)) else list(steps.norm),
        [(step, after) for step, before, after in ends if after > before],
        [(when - begun, size) for when, size in zip(steps.time, steps.process, strict=True)],
    )


def part_of(room: RoomPlugin, request: Request | None, history: History, folder: Folder, damage: list[str]) -> Any:
    """The room's own part of the report; if that fails, the reason is added to `damage`, so that no room breaks a
    report."""
    try:
        return None if request is None else room.part(request, history, folder)
    except Unusable as error:
        damage += [] if str(error) in damage else [str(error)]
        return None
    except (Exception, SystemExit) as error:
        damage.append(f"what the room {room.name} tells of it can't be made: {type(error).__name__}: {error}")
        return None


def checkpoints_in(folder: Folder) -> frozenset[str]:
    """The names of a run's existing checkpoints."""
    try:
        return frozenset(os.listdir(folder.checkpoints))
    except OSError:
        return frozenset()


def text_of(state: str, history: History, pid: int | None, unit: str = "step") -> str:
    """Why a run is in its state, if there is something to say."""
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
    if state == "running" and steps and history.last is not None:
        return silence(time.time() - history.last, list(steps.seconds[-20:]), pid, unit)
    text = doing.text if isinstance(doing, (Stopped, Failed)) else ""
    return text[:1].upper() + text[1:]


def damage_remark(lines: int) -> list[str]:
    """The remark about damaged lines."""
    if not lines:
        return []
    many = f"{lines:,} lines of {NAME} are" if lines > 1 else f"1 line of {NAME} is"
    return [f"{many} damaged and left out: what happened then is missing here; the weights do not depend on it"]


def silence(seconds: float, paces: list[float], pid: int | None, unit: str = "step") -> str:
    """A remark about a running run without recent events; empty if the silence is not unusual."""
    if seconds < max(30.0, 10 * max(paces[-20:])):
        return ""
    return f"No {unit} for {seconds_text(seconds)}, though its process {pid} is there: it may hang, be suspended, or wait for its data."
