"""The report of a run: all that is known of it, folded from its request, its plan and its events. What every page and export shows.

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

from shoestring.core.codec import Unreadable, from_json
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Figures, Quantity
from shoestring.core.rooms import RoomPlugin, room_named
from shoestring.core.units import seconds_text
from shoestring.planning.quantities import MEASURABLE, compared
from shoestring.runs.event import (
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
from shoestring.runs.events import NAME
from shoestring.runs.folder import Folder, Unusable, holder
from shoestring.runs.history import History, best_of, largest_life, measured
from shoestring.runs.plan_summary import PlanSummary, read_summary
from shoestring.runs.request import Request

E = TypeVar("E", bound=RoomEvent)
T = TypeVar("T")
NO_PLAN = PlanSummary()
ENDS = (Finished, Stopped, Failed)  # events that end a run; what it is then is called as they are


@dataclass(frozen=True)
class Curves:
    """What is told of the steps that count, in columns."""

    numbers: Sequence[int] = ()  # of the steps: 1, 2, 3 and so on, unless events are lost
    losses: Sequence[float] = ()  # not a number where it was none
    seconds: Sequence[float] = ()
    rates: Sequence[float] = ()  # learning rate, and norm of the gradients; empty: no step tells of it,
    norms: Sequence[float] = ()  # not a number: this one does not
    borders: Sequence[tuple[int, int]] = ()  # (step, rounds of the data that are over after it), where a round ended
    process: Sequence[tuple[float, int]] = ()  # (seconds since the run was begun, bytes of the process)


@dataclass(frozen=True)
class RunResult:
    """What the report.json of a run that is finished says beside its plan and its events."""

    weights_sha256: str = ""
    shown: str = ""  # what the job has to show for it


@dataclass(frozen=True)
class Report:
    path: Path = Path()  # of the run's folder
    request: Request | None = None  # None: it can't be read
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
    largest: Measured | None = None  # of the life with the highest tensor peak: when it was, and what it is made of
    timed: StageTimes | None = None  # who did what when, where workers hold different layers
    checkpoints: Sequence[Saved] = ()
    kept: frozenset[str] = frozenset()  # names of the checkpoints that are on disk now
    events: Sequence[Event] = ()  # all beside steps and measurements; damage as warnings at the end
    damage: Sequence[str] = ()  # what of the folder can't be used, and why
    begun: float | None = None  # seconds since 1970: the first event,
    last: float | None = None  # the last one,
    now: float = 0.0  # this moment
    told: Mapping[type[RoomEvent], Sequence[RoomEvent]] = field(
        default_factory=dict
    )  # by its room, of the steps that count
    of_room: Any = None  # what only runs of its room have (`RoomPlugin.part`)
    quantities: tuple[Quantity, ...] = MEASURABLE  # that are predicted and measured of it

    @property
    def job(self) -> str:
        """Its name, without the folder and .py."""
        return Path(self.request.job).stem if self.request else ""

    @property
    def room(self) -> str:
        return self.request.room if self.request else ""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Of the job: all of them, with their final values; of a run of a version before, the flags that were given."""
        return (self.request.arguments or self.request.flags) if self.request else {}

    @property
    def memory(self) -> int | None:
        """Bytes of the budget."""
        return self.request.memory if self.request else None

    @property
    def figures(self) -> Figures:
        """Predicted beside measured."""
        return compared(self.plan.predicted, self.measured, self.plan.basis, self.quantities)

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
        """What its room told of the steps that count, by one kind of its events."""
        return [one for one in self.told.get(kind, ()) if isinstance(one, kind)]


def report_of(path: Path, history: History | None = None) -> Report:
    """The report of the run in a folder; `history` if its events were read already. What is damaged is left out and told of."""
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
    damage += [history.wrong] * bool(history.wrong) + lost(history.damaged + (pid is None and history.rest > 0))
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
        measured=measured(history),
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
    """What is read; None where it can't be used, and why is added to `damage`."""
    try:
        return read()
    except Mistake as error:
        damage.append(str(error))
        return None


def usable_files(
    folder: Folder, quantities: tuple[Quantity, ...], finished: bool, damage: list[str]
) -> tuple[PlanSummary, RunResult | None]:
    """The plan of a run, and what the report of a finished one says beside it; without what of the two files can't be used."""
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
    """What only runs of its room have; where that can't be told, why is added to `damage`: no room takes a report down."""
    try:
        return None if request is None else room.part(request, history, folder)
    except Unusable as error:
        damage += [] if str(error) in damage else [str(error)]
        return None
    except (Exception, SystemExit) as error:
        damage.append(f"what the room {room.name} tells of it can't be made: {type(error).__name__}: {error}")
        return None


def checkpoints_in(folder: Folder) -> frozenset[str]:
    """The names of a run's checkpoints that are there now."""
    try:
        return frozenset(os.listdir(folder.checkpoints))
    except OSError:
        return frozenset()


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
    if state == "running" and steps and history.last is not None:
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
