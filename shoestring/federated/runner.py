"""A federation that runs in a folder: round after round, told as events, saved as checkpoints, and gone on with after whatever ended it.

What follows from a round's number and the seed is the same however often it is played, so a run that was killed and goes on ends with the
same bits. Noise follows from nothing: a private round that was killed before it was told of is played with other noise, and one that was
told of is not played again but taken from its checkpoint (private/release.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from shoestring.core.codec import finite_json
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.job import target
from shoestring.core.run import plain_run
from shoestring.core.seams import calls_user
from shoestring.core.signals import asked_by, listening
from shoestring.federated.events import RoundFinished
from shoestring.federated.prepare import Prepared
from shoestring.federated.room import FederatedPlan
from shoestring.federated.round import ServerState
from shoestring.federated.round_events import events_of_round, unlearned
from shoestring.federated.saved_weights import fits, row_of, weights_and_aliases
from shoestring.federated.simulation.simulation import Simulation
from shoestring.federated.techniques.private.release import RunLedger, check_delta_for, release_of
from shoestring.runs.cadence import Cadence
from shoestring.runs.checkpoints import (
    RunCheckpoint,
    believed,
    best_in,
    clear_drafts,
    forget_best,
    move_aside,
    newest_good,
    whole_number,
)
from shoestring.runs.digest import weights_sha256
from shoestring.runs.event import Begun, Event, Failed, Finished, Stopped, Validated, Warned
from shoestring.runs.events import Events, event_of, record_of
from shoestring.runs.folder import Folder
from shoestring.runs.history import History
from shoestring.runs.initial_weights import fresh_model
from shoestring.runs.report import report_of
from shoestring.runs.saver import Saver, Snapshot
from shoestring.runs.tensors import UnreadableTensors
from shoestring.training.validation import check_goal, run_validation

PARTS = ("step", "server", "devices", "parts", "best")  # what a checkpoint's state must have to be gone on from
FAILED = 3  # rounds in a row in which no device's work can be used: then it is the job that fails, or it has diverged
BUDGET = "epsilon is spent"  # why a run is over whose next round would exceed it


@dataclass(frozen=True)
class Ended:
    """How a federation ended."""

    rounds: int
    why: str  # "rounds", "epsilon is spent"; empty: it was asked to stop
    weights_sha256: str = ""
    unsaved: str = ""  # why the last weights could not be saved
    stopped: str = ""
    signal: int = 0  # that stopped it
    shown: str = ""


@dataclass
class Runner:
    given: Prepared
    plan: FederatedPlan
    folder: Folder
    tell: Callable[[Event], None]  # whoever looks on
    cadence: Cadence = field(default_factory=Cadence)
    every: int = 0  # rounds between two judgements; 0: a tenth of them
    heard: Callable[[int, int, int], None] = lambda number, done, given: (
        None
    )  # of the round that is played: devices done, of how many

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.given, self.plan.techniques, warn=lambda text: self.say(Warned(text)))
        self.model = fresh_model(self.given.job)
        self.server: ServerState = self.given.server(self.simulation.parts)
        self.best: tuple[float, int] | None = None
        self.answered = False  # somebody has, in this process's life
        self.failed = 0  # rounds in a row in which nobody did
        self.stop, self.signal = "", 0  # why to stop, and the signal that asked for it
        self.spent_up = False  # others on the ledger left nothing for the round that was played
        self.events = Events(self.folder.path)
        self.saver = Saver(self.folder.checkpoints, self.cadence, self.say)
        self.saver.by_loss = not self.given.job.validates
        release = release_of(self.plan.techniques, self.given)
        self.ledger = RunLedger(release, self.folder, self.given.asked.ledger) if release is not None else None
        self.known_lines = 0  # of the ledger, by the checkpoint that the run goes on from
        self.retold: list[Event] = []  # what that round was to be told of
        self.every = self.every or max(1, self.given.rounds // 10)

    @property
    def round(self) -> int:
        return self.server.round

    def say(self, event: Event) -> None:
        self.tell(self.events.add(event))

    # Beginning

    def resume(self) -> None:
        """Go to the newest good checkpoint, if there is one."""
        clear_drafts(self.folder.checkpoints)
        found, damaged = newest_good(self.folder.checkpoints, PARTS)
        for bad, reason in damaged:
            move_aside(bad)
            start = f"round {found.step}" if found else "the beginning"
            self.say(
                Warned(
                    f"the checkpoint of round {bad.step} is damaged ({reason}): it is kept aside, and the run goes on from "
                    f"{start}"
                )
            )
        if found is not None:
            self.restore(found)
        if self.ledger is not None:
            self.open(self.ledger)
        forget_best(self.folder.checkpoints, self.round)
        follow = "from the seed" if self.ledger is None else "with noise of their own"
        how = f"its rounds follow {follow}" if self.round else "from the beginning"
        self.say(Begun(pid=os.getpid(), steps=self.given.rounds, step=self.round, how=how))
        if self.plan.doubt and not self.round:
            self.say(Warned(self.plan.doubt))
        self.tell_again()

    def restore(self, checkpoint: RunCheckpoint) -> None:
        with believed(checkpoint):
            self.take(checkpoint, checkpoint.state())

    def take(self, checkpoint: RunCheckpoint, state: dict[str, Any]) -> None:
        row = row_of(checkpoint, self.given.layout)
        server = {name: value.clone() for name, value in state["server"].items()}
        for name, initial in self.server.state.items():
            if name not in server or not fits(server[name], initial):
                raise UnreadableTensors(f"its {name} is not what the run's techniques keep")
        self.server = self.given.server_at(whole_number(state["step"]), row, server)
        self.simulation.states.update(
            {name: {key: value.clone() for key, value in one.items()} for name, one in state["devices"].items()}
        )
        if state.get("plainly"):
            self.simulation.fall_back(str(state["plainly"]))
        self.best = best_in(state)
        self.saver.saved_step, self.saver.best = self.round, None if self.given.job.validates else self.best
        self.known_lines = whole_number(state.get("ledger lines", 0))
        self.retold = [event for event in map(event_of, state.get("told", ())) if event is not None]

    def open(self, ledger: RunLedger) -> None:
        """Take the ledger up, tell of it, and refuse a run that it has no room for."""
        spending = ledger.open(self.round, self.known_lines)
        if why := ledger.refusal(self.given.rounds):
            raise OverBudget(why, self.plan)
        for text in filter(
            None, (check_delta_for(ledger.release.delta, self.given.population.count), *ledger.warnings())
        ):
            self.say(Warned(text))
        if self.round and not ledger.knows(self.server.weights):
            self.say(
                Warned(
                    f"the weights of round {self.round} are not what {ledger.path} says was released: one of them is of another "
                    f"time, or was changed"
                )
            )
        again = sorted({one.round + 1 for one in spending.own if one.round >= self.round})
        if again:
            self.say(
                Warned(
                    f"what round {', '.join(map(str, again))} released is not in a checkpoint: played again it is another release, "
                    f"with other noise, and is spent again"
                )
            )

    def tell_again(self) -> None:
        """What a kill kept from being told of the round that the run goes on from."""
        told = History().read(self.folder.path).of_kind(RoundFinished)
        if self.retold and (not told or told[-1].step < self.round):
            for event in self.retold:
                self.say(event)

    # Rounds

    def run(self) -> Ended:
        with listening(self.asked_to_stop), ExitStack() as stack:
            stack.callback(self.events.close)
            stack.callback(self.saver.close)
            self.resume()
            why = ""
            try:
                while not self.stop and not why:
                    why = self.over()
                    if not why:
                        self.one_round()
            finally:
                self.simulation.close()
            return self.ended(why)

    def over(self) -> str:
        """Why there is no further round; empty if there is one."""
        if self.round >= self.given.rounds:
            return "rounds"
        if self.ledger and (self.spent_up or self.ledger.over(self.round)):
            return BUDGET
        return ""

    def one_round(self) -> None:
        begun = time.perf_counter()
        last = self.round + 1 == self.given.rounds
        judges = bool(self.given.job.local.held_out) and (last or (self.round + 1) % self.every == 0)
        before = self.server.state
        played = self.simulation.play(
            self.server, judges, self.strict, lambda done, given: self.heard(self.round + 1, done, given)
        )
        if self.ledger and not self.ledger.spend(
            self.round, played.server.weights
        ):  # on disk before anything of the round is known
            self.spent_up = True  # by another run meanwhile: this round is forgotten
            return
        self.failed = self.failed + 1 if played.rejected and not played.participants else 0
        self.answered = self.answered or bool(played.participants)
        if not bool(played.server.row.isfinite().all()):
            raise Mistake(
                f"the weights after round {self.round + 1} are not finite: the federation diverged. A lower rate (Local(lr=...), "
                f"the server's rule) or shorter updates (NormBound) may help; what was saved before is in {self.folder.path}"
            )
        self.server = played.server
        self.saver.losses.append(played.loss)
        told = events_of_round(played, before, time.perf_counter() - begun, self.spent())
        if self.given.job.validates and (last or self.round % self.every == 0):
            told.append(self.validate())
        self.keep_and_tell(told, last)

    def keep_and_tell(self, told: list[Event], last: bool) -> None:
        """Save if it is time, and tell of a round. A private one is on disk before it is told of, or it would have to be spent again."""
        if self.ledger:
            self.retold = told
            self.saver.save(self.snapshot)
            self.saver.wait()
        for event in told:
            self.say(event)
        if not self.ledger and (self.saver.due(self.round) or last or self.stop):
            self.saver.save(self.snapshot)

    @property
    def strict(self) -> bool:
        """Whether a round in which all devices fail ends the run: the first one shows that the job fails, unless it has one device only.
        Later ones, or one device, may be bad luck; several in a row are not, nor is a run in which nobody ever answered."""
        last = self.round + 1 == self.given.rounds
        return self.failed + 1 >= FAILED or not (self.answered or (self.given.population.per_round == 1 and not last))

    def spent(self) -> Mapping[str, float] | None:
        """What a private run has spent; None if it is not private."""
        return self.ledger.spent_figures(exactly=self.round == self.given.rounds) if self.ledger else None

    def validate(self) -> Validated:
        """Try the global model on the job's held-out data."""
        begun, job = time.perf_counter(), self.given.job
        self.given.layout.load(self.model, self.server.row)
        found = run_validation(plain_run(job, self.model, {}), job)
        check_goal(job, found)
        goal = target(job.goal)
        best = goal.better(found[goal.metric], self.best[0] if self.best else None)
        if best:
            self.best = (found[goal.metric], self.round)
            self.saver.save_best(lambda: self.snapshot_of({"metrics": dict(found)}))
        return Validated(self.round, 0, finite_json(found), time.perf_counter() - begun, best)

    # Keeping

    def snapshot(self) -> Snapshot:
        private = (
            {"ledger lines": self.ledger.opened.lines, "told": [record_of(one) for one in self.retold]}
            if self.ledger
            else {}
        )
        return self.snapshot_of(
            {
                "server": dict(self.server.state),
                "devices": self.simulation.states,
                "plainly": self.simulation.fallback_reason,
                "best": self.best if self.given.job.validates else self.saver.best,
                **private,
            }
        )

    def snapshot_of(self, state: dict[str, Any]) -> Snapshot:
        """The weights of now, and some state."""
        self.given.layout.load(self.model, self.server.row)
        weights, aliases = weights_and_aliases(self.model)
        course = (
            {"course": {"best": self.best}} if self.given.job.validates else {}
        )  # as a training has it: best weights are pruned by it
        return Snapshot(
            self.round, weights, aliases, {"step": self.round, "parts": course, "model": {}, "on_disk": [], **state}
        )

    def asked_to_stop(self, number: int, frame: Any) -> None:
        """The first signal lets the round end and saves; a second one ends at once."""
        if self.stop:
            os._exit(128 + number)
        self.stop, self.signal = asked_by(number), number

    @calls_user("show")
    def ended(self, why: str) -> Ended:
        self.saver.wait()
        if self.saver.saved_step != self.round:
            self.saver.save(self.snapshot)
        self.saver.close()
        if self.saver.saved_step != self.round:
            text = (
                f"all {self.round} rounds are done, but the weights after the last one could not be saved ({self.saver.trouble}): "
                f"{self.saver.cure} and give the same command"
            )
            self.say(Failed(text))
            return Ended(self.round, why, unsaved=text)
        if not why:
            text = f"stopped after round {self.round} of {self.given.rounds}, {self.stop}"
            self.say(Stopped(self.round, text))
            return Ended(self.round, "", stopped=text, signal=self.signal)
        if why == BUDGET:
            self.say(
                Warned(
                    f"epsilon is spent after round {self.round}: the next round would exceed what this run may spend"
                    f"{', or what all runs on the ledger may' * (self.ledger is not None and self.ledger.opened.limit is not None)}"
                    f", so there is none"
                )
            )
        if found := unlearned([loss for loss in report_of(self.folder.path).curves.losses if isfinite(loss)]):
            self.say(Warned("; ".join(filter(None, (found, self.plan.doubt)))))
        self.given.layout.load(self.model, self.server.row)
        shown = self.shown()
        self.say(Finished(self.round, "steps" if why == "rounds" else why))
        return Ended(self.round, why, weights_sha256(self.model.state_dict()), shown=shown)

    def shown(self) -> str:
        """What the job shows of its model. If that fails (of a model that diverged, say), the run is no less finished."""
        try:
            return self.given.job.show(self.model) if self.given.job.show is not None else ""
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            self.say(Warned(f"the job's `show` failed: {type(error).__name__}: {said}; the weights are saved"))
            return ""
