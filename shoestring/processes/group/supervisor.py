"""The supervisor: the launcher's view of this machine's workers and of the group, and the reaction to deaths.

It receives messages from workers (channel) and other machines (rendezvous) and exit codes (fork server), decides by
group/decision.py, and reports to the user and to the run's events.

Contract: A group that lost a worker is formed again from the last checkpoint and ends with the same bits
(tests/processes/test_kill_matrix.py, decisions/009). Every death is reported once, by the launcher of that worker. An
error that would happen again is one message from one worker, and ends the group. Every wait between workers has a
deadline (tests/processes/group/test_supervisor.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoestring.core.errors import Crashed
from shoestring.core.running.signals import STOP
from shoestring.core.units import seconds_text
from shoestring.processes.group.channel import PEER_LOST, Receiver
from shoestring.processes.group.decision import TRIES, Decision, Setback, decide
from shoestring.processes.group.rendezvous import Rendezvous
from shoestring.processes.group.round import GroupRound, write_round
from shoestring.processes.launch import exit_reason, fingerprint, memory_kills, result_of, say
from shoestring.processes.messages import (
    Answer,
    Failure,
    Happened,
    Heartbeat,
    Message,
    OutOfMemory,
    PeerLostMessage,
    StopAsked,
    WorkerDied,
    WorkerJoined,
)
from shoestring.processes.nodes import Team
from shoestring.processes.standstill import deadline_of, no_answer
from shoestring.processes.task import GroupHistory, JobTask, Task
from shoestring.runs.events.event import Begun, Died, Event, Reformed, Saved, Stepped, Stopped, Warned
from shoestring.runs.events.event_log import note

LOOK = 0.1  # seconds between two looks at the workers
JOIN = 60.0  # seconds for workers to find each other
LEAVE = 10.0  # seconds in which a worker that is done must end


class StoppedUnsaved(Exception):
    """Asked to stop when no worker was left that could save."""


class Supervisor:
    """This machine's workers as their launcher sees them, and the state of the group."""

    def __init__(
        self,
        private: Path,
        task: Task[Any],
        on_event: Callable[[Event], None],
        rendezvous: Rendezvous,
        workers: Team,
        expected: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`private`: the group's own folder; `expected`: the fingerprint given by node 0, if this is another machine;
        `clock`: used to tell how long a worker was silent."""
        self.private, self.task, self.on_event, self.rendezvous = private, task, on_event, rendezvous
        self.patience, self.limit, self.clock = workers.patience, workers.restarts, clock
        self.folder = Path(task.run_folder) if task.run_folder else None
        self.receiver = Receiver(private / "socket")
        self.fingerprint = expected or (fingerprint(task.file) if isinstance(task, JobTask) else {})
        self.asked: list[int] = []  # stop signals received
        self.step = self.furthest = 0  # the last step that was done, and the highest step so far
        self.saved = 0  # step of the last checkpoint
        self.restarts = 0  # number of restarts,
        self.fruitless = 0  # and of restarts since the last new step
        self.recovery: list[float] = []  # seconds from a death to the next step
        self.died_at = 0.0  # time of the death that the group has not recovered from yet
        self.paused_at = 0.0  # time when it was asked to pause and let others in
        self.machines: list[int] = []  # that take part
        self.begin_round([], 0)

    def begin_round(self, ranks: list[int], world: int) -> None:
        """Workers are about to be started here, with these ranks out of `world`."""
        if self.machines:
            self.listen()  # read the last messages of the previous workers
        for node in (node for node in self.machines if node not in self.rendezvous.members):
            self.tell(
                Warned(
                    f"node {node} of {self.rendezvous.nodes.of} is gone: the others go on without it; it can come back "
                    f"by the same command"
                )
            )
        self.world, self.machines = world, list(self.rendezvous.members)
        self.kills = memory_kills()
        self.told_at = self.clock()  # time of the last message that was more than a sign of life
        self.heard = dict.fromkeys(ranks, self.clock())  # per worker: time of its last sign of life
        self.joined: set[int] = (
            set()
        )  # workers that found the others; before that, importing torch may delay their heartbeats
        self.done: dict[int, float] = {}  # per worker that gave its result: when
        self.failures: list[Failure] = []  # in order of arrival
        self.answer: Answer | None = None  # from worker 0
        self.peer_lost = ""  # how one worker lost another,
        self.waited = False  # and whether it waited until its deadline
        self.pid = 0  # of worker 0, once it can be asked to stop
        self.counted = False  # a death in this round was counted as a restart
        self.stop_sent = False  # worker 0 was asked to stop
        task = replace(self.task, file=self.source(self.task.file)) if isinstance(self.task, JobTask) else self.task
        write_round(
            self.private,
            task,
            GroupRound(
                self.rendezvous.round,
                self.fingerprint,
                JOIN,
                max(10 * self.patience, JOIN),
                len(ranks) == world,
                self.rendezvous.nodes.device,
            ),
        )

    def source(self, given: str) -> str:
        """The job file, or the run's own copy if the file was changed while the run went on."""
        copy = self.folder / "job.py" if self.folder is not None else Path(given)
        changed = self.restarts and fingerprint(given) != self.fingerprint
        return str(copy) if changed and copy.is_file() and fingerprint(str(copy)) == self.fingerprint else given

    def send_signal(self, sig: int) -> None:
        """Ask the group to stop, as `signals.stopping_gently` does. Killing it is the agent's business."""
        if sig not in STOP:
            return
        if not self.rendezvous.leads:
            self.rendezvous.tell(StopAsked())
        elif self.pid and not self.stop_sent:  # a second signal would keep it from saving
            self.stop_sent = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)
        else:
            self.rendezvous.leaving = not self.pid

    def listen(self) -> None:
        """Read the messages of workers here and of other machines."""
        for rank, message in self.receiver.receive():
            self.heard[rank] = self.clock()
            self.take(rank, message)
        for news in self.rendezvous.news():
            if isinstance(news, StopAsked):
                self.asked.append(signal.SIGTERM)
                self.send_signal(signal.SIGTERM)
            elif isinstance(news, WorkerDied):
                self.recover([news], news.round)
            elif isinstance(news, Failure):
                self.failures.append(news)

    def take(self, rank: int, message: Message) -> None:
        """Handle a message from a worker here."""
        self.told_at = self.told_at if isinstance(message, Heartbeat) else self.clock()
        if isinstance(message, Answer):
            self.done[rank] = self.clock()
            self.answer = message if rank == 0 else self.answer
        elif isinstance(message, PeerLostMessage):
            self.peer_lost, self.waited = self.peer_lost or message.text, self.waited or message.deadline
        elif isinstance(message, Failure):
            self.failures.append(message)
        elif isinstance(message, WorkerJoined):
            self.joined.add(rank)
        elif isinstance(message, Happened) and rank == 0:
            self.follow(message.event)

    def follow(self, event: Event) -> None:
        """Handle an event from worker 0 about the run."""
        if isinstance(event, Begun):
            self.pid, self.step = event.pid, event.step
            self.furthest, self.saved = max(self.furthest, self.step), max(self.saved, self.step)
            if self.died_at or self.paused_at:
                after = event.time - (self.died_at or self.paused_at)
                self.paused_at = 0.0
                self.tell(
                    Reformed(
                        self.world,
                        after,
                        self.step,
                        f"{self.world} workers go on from {step_text(self.step)}, {seconds_text(after)} later",
                    )
                )
            if self.asked:  # the request came before it could listen
                self.send_signal(self.asked[0])
        elif isinstance(event, Saved):
            self.saved = event.step
        elif isinstance(event, Stepped):
            self.step = event.step
            if self.died_at:
                self.recovery.append(event.time - self.died_at)
                self.died_at = 0.0
            if self.step > self.furthest:
                self.furthest, self.fruitless = self.step, 0
        self.on_event(event)

    def tell(self, event: Event) -> None:
        """Report an event of the group itself."""
        if self.folder is not None:
            note(self.folder, event)
        self.on_event(replace(event, time=time.time()))

    def missing(self, codes: Mapping[int, int | None]) -> list[WorkerDied] | None:
        """Workers that died or hang, if the others can't continue; empty if the cause may be on another machine. None:
        all is well.

        `codes`: exit code of each worker here, None for running ones. Messages of dead workers are read after this was
        found.
        """
        self.listen()
        now = self.clock()
        if (deadline := deadline_of(self.task)) is not None and now - self.told_at > deadline:
            raise no_answer(self.task)
        deaths = [
            WorkerDied(rank, *exit_reason(code))
            for rank, code in codes.items()
            if code is not None and code != PEER_LOST and (code or rank not in self.done)
        ]
        silent = {rank: now - self.heard[rank] for rank, code in codes.items() if code is None}
        stuck = {
            rank: seconds
            for rank, seconds in silent.items()
            if seconds > (self.patience if rank in self.joined else max(self.patience, JOIN))
        }
        deaths += [
            WorkerDied(
                rank,
                f"no sign of life for {seconds_text(seconds)}",
                "it was suspended, or its machine is overloaded",
                seconds,
            )
            for rank, seconds in stuck.items()
        ]
        lingering = self.finished(codes) and now - max(self.done.values()) > LEAVE and None in codes.values()
        return deaths if deaths or PEER_LOST in codes.values() or self.failures or lingering else None

    def finished(self, ranks: Collection[int]) -> bool:
        return self.answer is not None if 0 in ranks else set(ranks) <= set(self.done)

    def judge(self, deaths: list[WorkerDied]) -> None:
        """Decide what to do about deaths, once no worker is left here. Raises the error that ends the group."""
        self.listen()
        until, here = time.monotonic() + 1.0, self.rendezvous
        while (
            here.leads
            and here.nodes.of > 1
            and time.monotonic() < until
            and not (deaths or self.failures or self.counted)
        ):
            time.sleep(LOOK)  # the death was on another machine
            self.listen()
        if not here.leads:  # node 0 decides
            for message in (*self.failures[:1], *(replace(death, round=here.round) for death in deaths)):
                here.tell(message)
            return
        decision = decide(Setback(self.failures, bool(self.asked), deaths, memory_kills() > self.kills))
        if decision is Decision.FAIL:
            say(self.failures[0].trace)
            raise self.failures[0].error
        if decision is Decision.STOP:
            raise StoppedUnsaved
        if decision is Decision.OUT_OF_MEMORY:
            raise OutOfMemory(
                f"the kernel killed worker {deaths[0].rank} of {self.world} when the machine ran out of memory"
            )
        self.recover(deaths, here.round)

    def recover(self, deaths: Sequence[WorkerDied], number: int) -> None:
        """Report deaths in the round with this number and continue, unless there were too many. No deaths: workers lost
        each other."""
        counted = self.counted or number < self.rendezvous.round  # several machines may report the same round
        if not counted:
            self.died_at = self.died_at or time.time() - max((death.ago for death in deaths), default=0.0)
            self.restarts += 1
            self.fruitless += 1
        in_vain = self.waited and not deaths and not self.task.resumes
        last = (
            decide(
                Setback(
                    deaths=deaths, restarts=self.restarts, limit=self.limit, fruitless=self.fruitless, in_vain=in_vain
                )
            )
            is Decision.GIVE_UP
        )
        onward = "" if last else f": the others re-form and go on from {step_text(self.saved)}"
        for death in deaths:
            self.tell(Died(death.rank, death.why, self.step, f"{death} after {step_text(self.step)}{onward}"))
        if not deaths and not counted:
            how = (
                "one did not answer in time"
                if self.waited or "timed out" in self.peer_lost.lower()
                else "a connection broke"
            )
            self.tell(Warned(f"the workers lost each other after {step_text(self.step)} ({how}){onward}"))
        self.counted = self.counted or not counted
        if last:
            raise Crashed(self.give_up_text(deaths))

    def give_up_text(self, deaths: Sequence[WorkerDied]) -> str:
        who = str(deaths[0]) if deaths else "the workers lost each other" + self.waited * f" ({self.peer_lost})"
        if self.waited and not deaths and not self.task.resumes:
            return f"{who}: a worker stands still in the job, or each waits for another, and it would come again"
        meaning = f"{deaths[0].meaning}; " if deaths and deaths[0].meaning else ""
        kept = f"the last checkpoint is of step {self.saved}" if self.saved else "there is no checkpoint yet"
        there = f" in {self.folder}" if self.folder and self.saved else ""
        if self.fruitless >= TRIES:
            return (
                f"{who}, and in {self.fruitless} tries no new step was done after {step_text(self.furthest)}: {meaning}{kept}{there}; "
                f"the same command tries again from there"
            )
        return (
            f"{who} after {step_text(self.step)}, and the {self.limit} restarts that --restarts allows are used up: "
            f"{meaning}{kept}{there}; the same command goes on from there"
        )

    def make_room(self) -> None:
        """Let in machines that came late or came back: save, and form another round with them."""
        if self.pid and not self.rendezvous.paused and self.rendezvous.newcomers:
            self.rendezvous.pause()
            self.paused_at = time.time()
            self.send_signal(signal.SIGTERM)

    def result(self) -> Any:
        """The task's result, from worker 0."""
        if self.answer is None:
            raise Crashed("the workers ended without a result")
        return self.with_group(result_of(self.task, self.answer))

    def stop_result(self) -> Any:
        """The result of a training that was stopped when no worker was left that could save."""
        if self.folder is not None and self.saved:
            note(self.folder, Stopped(self.saved, f"stopped; the last checkpoint is of step {self.saved}"))
        return self.with_group(self.task.stop_result(self.saved))

    def with_group(self, result: Any) -> Any:
        """The result with what only the launcher knows: the number of restarts."""
        return self.task.in_group(result, GroupHistory(self.world, self.restarts, tuple(self.recovery)))


def step_text(step: int) -> str:
    return f"step {step}" if step else "the beginning"
