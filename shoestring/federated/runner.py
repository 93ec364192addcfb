"""Runs a federation in a folder: plays rounds, writes events, saves checkpoints, and resumes.

A round is determined by its number and the seed, so a killed and resumed run ends with the same bits. Private noise is
not determined by anything: a private round that was killed before it was reported is played again with new noise; one
that was reported is not played again, but taken from its checkpoint (private/release.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from shoestring.core.errors import Mistake, OverBudget, error_sentence
from shoestring.core.files.codec import finite_json
from shoestring.core.job import target
from shoestring.core.running.run import plain_run
from shoestring.core.running.signals import listening, stop_reason
from shoestring.core.user_code.seams import calls_user
from shoestring.federated.events import RoundFinished
from shoestring.federated.model.saved_weights import fits, row_of, weights_and_aliases
from shoestring.federated.planning.prepare import Prepared
from shoestring.federated.playing.round_events import events_of_round, stagnation_warning
from shoestring.federated.room import FederatedPlan, doubt
from shoestring.federated.round import ServerState
from shoestring.federated.simulation.simulation import Simulation
from shoestring.federated.techniques.private.release import RunLedger, check_delta_for, release_of
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import (
    RunCheckpoint,
    best_in,
    clear_drafts,
    forget_best,
    move_aside,
    newest_good,
    reading_untrusted,
    whole_number,
)
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.checkpoints.saver import Saver, Snapshot
from shoestring.runs.events.event import Begun, Event, Failed, Finished, Stopped, Validated, Warned
from shoestring.runs.events.event_log import Events, event_of, record_of
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import report_of
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.runs.weights.tensors import UnreadableTensors
from shoestring.training.validation import check_goal, run_validation

PARTS = ("step", "server", "devices", "parts", "best")  # required parts of a checkpoint's state
FAILED = 3  # after so many rounds in a row without a usable update, the job counts as failed or diverged
BUDGET = "epsilon is spent"  # why a run ends whose next round would exceed its epsilon


@dataclass(frozen=True)
class FederationResult:
    """How a federation ended."""

    rounds: int
    why: str  # "rounds", "epsilon is spent"; empty: it was asked to stop
    weights_sha256: str = ""
    unsaved: str = ""  # why the last weights could not be saved
    stopped: str = ""
    signal: int = 0  # the signal that stopped it
    shown: str = ""

    @property
    def unfinished(self) -> bool:
        return bool(self.stopped or self.unsaved)


@dataclass
class Runner:
    given: Prepared
    plan: FederatedPlan
    folder: Folder
    tell: Callable[[Event], None]  # receives events
    cadence: Cadence = field(default_factory=Cadence)
    every: int = 0  # rounds between two evaluations; 0: a tenth of them
    heard: Callable[[int, int, int], None] = lambda number, done, given: (
        None
    )  # progress within a round: devices done, out of all

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.given, self.plan.techniques, warn=lambda text: self.say(Warned(text)))
        self.model = fresh_model(self.given.job)
        self.server: ServerState = self.given.server(self.simulation.parts)
        self.best: tuple[float, int] | None = None
        self.answered = False  # whether any device has answered since this process started
        self.failed = 0  # rounds in a row without an answer
        self.stop, self.signal = "", 0  # the reason to stop, and the signal that asked for it
        self.spent_up = False  # other runs on the ledger left nothing for the round that was played
        self.events = Events(self.folder.path)
        self.saver = Saver(self.folder.checkpoints, self.cadence, self.say)
        self.saver.by_loss = not self.given.job.validates
        release = release_of(self.plan.techniques, self.given)
        self.ledger = RunLedger(release, self.folder, self.given.asked.ledger) if release is not None else None
        self.known_lines = 0  # of the ledger, as recorded in the checkpoint
        self.retold: list[Event] = []  # the events that the round should have reported
        self.every = self.every or max(1, self.given.rounds // 10)

    @property
    def round(self) -> int:
        return self.server.round

    def say(self, event: Event) -> None:
        self.tell(self.events.add(event))

    # Starting

    def resume(self) -> None:
        """Restore the newest good checkpoint, if there is one."""
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
        self.tell_again()

    def restore(self, checkpoint: RunCheckpoint) -> None:
        with reading_untrusted(checkpoint):
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
        """Open the ledger, report its state, and refuse a run that it has no room for."""
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
        """Report again the events of the last round that a kill may have suppressed."""
        told = History().read(self.folder.path).of_kind(RoundFinished)
        if self.retold and (not told or told[-1].step < self.round):
            for event in self.retold:
                self.say(event)

    # Rounds

    def run(self) -> FederationResult:
        with listening(self.on_signal), ExitStack() as stack:
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
            return self.end(why)

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
        ):  # on disk before anything of the round is revealed
            self.spent_up = True  # another run spent it meanwhile: this round is discarded
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
        told = events_of_round(played, before, time.perf_counter() - begun, self.privacy_figures())
        if self.given.job.validates and (last or self.round % self.every == 0):
            told.append(self.validate())
        self.keep_and_tell(told, last)

    def keep_and_tell(self, told: list[Event], last: bool) -> None:
        """Save if it is time, and report a round. A private round is saved before it is reported; otherwise it would
        have to be paid for again."""
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
        """Whether a round in which all devices fail ends the run. In the first round it shows that the job fails,
        unless there is only one device. Later it may be bad luck, but not several times in a row, and not if no device
        ever answered."""
        last = self.round + 1 == self.given.rounds
        return self.failed + 1 >= FAILED or not (self.answered or (self.given.population.per_round == 1 and not last))

    def privacy_figures(self) -> Mapping[str, float] | None:
        """Epsilon spent by a private run; None if it is not private."""
        return self.ledger.spent_figures(exactly=self.round == self.given.rounds) if self.ledger else None

    def validate(self) -> Validated:
        """Evaluate the global model on the job's held-out data."""
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

    # Saving

    def snapshot(self) -> Snapshot:
        private = (
            {"ledger lines": self.ledger.ledger.lines, "told": [record_of(one) for one in self.retold]}
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
        """The present weights, and some state."""
        self.given.layout.load(self.model, self.server.row)
        weights, aliases = weights_and_aliases(self.model)
        course = (
            {"course": {"best": self.best}} if self.given.job.validates else {}
        )  # as in training runs: best weights are pruned by it
        return Snapshot(
            self.round, weights, aliases, {"step": self.round, "parts": course, "model": {}, "on_disk": [], **state}
        )

    def on_signal(self, number: int, frame: Any) -> None:
        """The first signal ends the run after this round and saves; a second one ends it at once."""
        if self.stop:
            os._exit(128 + number)
        self.stop, self.signal = stop_reason(number), number

    @calls_user("show")
    def end(self, why: str) -> FederationResult:
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
            return FederationResult(self.round, why, unsaved=text)
        if not why:
            text = f"stopped after round {self.round} of {self.given.rounds}, {self.stop}"
            self.say(Stopped(self.round, text))
            return FederationResult(self.round, "", stopped=text, signal=self.signal)
        if why == BUDGET:
            self.say(
                Warned(
                    f"epsilon is spent after round {self.round}: the next round would exceed what this run may spend"
                    f"{', or what all runs on the ledger may' * (self.ledger is not None and self.ledger.ledger.limit is not None)}"
                    f", so there is none"
                )
            )
        if found := stagnation_warning([loss for loss in report_of(self.folder.path).curves.losses if isfinite(loss)]):
            self.say(Warned("; ".join(filter(None, (found, doubt(self.plan))))))
        self.given.layout.load(self.model, self.server.row)
        shown = self.show_result()
        self.say(Finished(self.round, "steps" if why == "rounds" else why))
        return FederationResult(self.round, why, weights_sha256(self.model.state_dict()), shown=shown)

    def show_result(self) -> str:
        """The result of the job's `show` for its model. If that fails (a diverged model, for example), the run is
        finished all the same."""
        try:
            return self.given.job.show(self.model) if self.given.job.show is not None else ""
        except Exception as error:
            self.say(Warned(f"the job's `show` failed: {error_sentence(error)}; the weights are saved"))
            return ""
