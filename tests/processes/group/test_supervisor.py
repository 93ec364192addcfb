"""What follows when workers of a group end: decided without any process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.errors import Crashed, Mistake
from shoestring.processes.group.channel import PEER_LOST
from shoestring.processes.group.decision import TRIES, Decision, Setback, decide
from shoestring.processes.group.round import read_round
from shoestring.processes.group.supervisor import JOIN, StoppedUnsaved, Supervisor
from shoestring.processes.launch import exit_reason
from shoestring.processes.messages import (
    Answer,
    Cause,
    Failure,
    Happened,
    Heartbeat,
    Message,
    OutOfMemory,
    PeerLostMessage,
    StopAsked,
    WorkerDied,
    WorkerJoined,
    event_message,
)
from shoestring.processes.nodes import Nodes, Team
from shoestring.processes.standstill import NoAnswer
from shoestring.processes.task import Task
from shoestring.runs.events.event import Begun, Died, Reformed, Saved, Stepped, Warned
from shoestring.training.evidence.tasks import TrialTask
from tests.tasks import train_task

KILLED = WorkerDied(1, *exit_reason(-signal.SIGKILL))
WRONG = Failure(Cause.MISTAKE, "worker 1 of 2: no such thing")


@pytest.mark.parametrize(
    ("setback", "follows"),
    [
        (Setback(deaths=[KILLED]), Decision.RESTART),
        (Setback(), Decision.RESTART),  # they lost each other, and nobody died
        (Setback(deaths=[KILLED], kernel_killed=True), Decision.OUT_OF_MEMORY),
        (
            Setback(deaths=[WorkerDied(1, "SIGSEGV")], kernel_killed=True),
            Decision.RESTART,
        ),  # the kernel took some other process
        (Setback(deaths=[KILLED], restarts=10, limit=10), Decision.RESTART),
        (Setback(deaths=[KILLED], restarts=11, limit=10), Decision.GIVE_UP),
        (Setback(deaths=[KILLED], restarts=1, limit=0), Decision.GIVE_UP),
        (Setback(deaths=[KILLED], restarts=5, fruitless=TRIES), Decision.GIVE_UP),
        (Setback(in_vain=True), Decision.GIVE_UP),  # they would wait for each other again
        (Setback(deaths=[KILLED], asked_to_stop=True, kernel_killed=True), Decision.STOP),
        (Setback([WRONG], True, [KILLED], True, 99), Decision.FAIL),  # what would come again comes first
    ],
)
def test_what_follows_from_a_setback(setback: Setback, follows: Decision) -> None:
    assert decide(setback) is follows


class Machines:
    """A rendezvous of machines that are not there."""

    def __init__(self, rank: int = 0, of: int = 1) -> None:
        self.nodes, self.members, self.round = Nodes(rank=rank, of=of), [0], 0
        self.leads, self.leaving, self.paused = rank == 0, False, False
        self.told: list[Message] = []  # by this machine to node 0
        self.coming: list[Message] = []  # news for this machine

    def tell(self, message: Message) -> None:
        self.told.append(message)

    def news(self) -> Iterator[Message]:
        while self.coming:
            yield self.coming.pop(0)


class Group:
    """A supervisor of workers whose messages a test makes up."""

    def __init__(
        self,
        place: Path,
        rank: int = 0,
        of: int = 1,
        restarts: int = 10,
        kills: Callable[[], int] = lambda: 0,
        task: Task[Any] | None = None,
    ) -> None:
        place.mkdir(exist_ok=True)
        (place / "job.py").write_text("")
        self.machines, self.events = Machines(rank, of), []  # type: tuple[Machines, list[Event]]
        rendezvous: Any = self.machines
        self.supervisor = Supervisor(
            place, task or train_task(place / "job.py", 9), self.events.append, rendezvous, Team(restarts=restarts)
        )
        self.supervisor.begin_round([0, 1], 2)

    def hears(self, rank: int, *messages: Message) -> None:
        for message in messages:
            self.supervisor.take(rank, message)

    def goes_to(self, step: int) -> None:
        self.hears(
            0, *(event_message(Stepped(number, 1.0, 0.1, 1, 1, time=float(number))) for number in range(1, step + 1))
        )

    def dies(self, *deaths: WorkerDied) -> None:
        """Workers end, and the group is formed again."""
        self.supervisor.judge(list(deaths))
        self.machines.round += 1
        self.supervisor.begin_round([0, 1], 2)


@contextmanager
def group(place: Path, **more: Any) -> Iterator[Group]:
    made = Group(place, **more)
    with closing(made.supervisor.receiver):
        yield made


def test_a_worker_that_was_killed_is_told_of_once_and_the_group_goes_on(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        made.hears(0, event_message(Begun(pid=7, steps=9, step=0, time=1.0)), event_message(Saved(3, time=2.0)))
        made.goes_to(5)
        assert made.supervisor.missing({0: None, 1: -9}) == [KILLED]
        made.dies(KILLED)
        died = made.events[-1]
        assert (
            isinstance(died, Died)
            and died.text == "worker 1 died (SIGKILL) after step 5: the others re-form and go on from step 3"
        )
        made.hears(0, event_message(Begun(pid=8, steps=9, step=3, time=made.supervisor.died_at + 2.0)))
        again = next(event for event in made.events if isinstance(event, Reformed))
        assert again.seconds == pytest.approx(2.0) and again.world == 2 and "go on from step 3" in again.text
        made.hears(0, event_message(Stepped(4, 1.0, 0.1, 1, 1, time=made.supervisor.died_at + 3.0)), Answer({}))
        result = made.supervisor.result()
        assert result.restarts == 1 and result.world == 2 and result.recovery_seconds == (pytest.approx(3.0),)


def test_without_a_new_step_it_is_given_up_and_with_one_it_is_not(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        made.dies(KILLED)
        made.dies(KILLED)
        made.goes_to(1)
        made.dies(KILLED)
        made.dies(KILLED)
        with pytest.raises(
            Crashed, match=r"in 3 tries no new step was done after step 1: it was killed .*; there is no checkpoint yet"
        ):
            made.dies(KILLED)
    with (
        group(tmp_path / "never", restarts=0) as made,
        pytest.raises(Crashed, match="the 0 restarts that --restarts allows are used up"),
    ):
        made.dies(KILLED)


def test_a_failure_ends_the_group_and_a_request_to_stop_comes_before_another_try(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        made.hears(1, WRONG)
        assert made.supervisor.missing({0: None, 1: None}) == [], "nobody died, and there is no going on"
        with pytest.raises(Mistake, match="no such thing"):
            made.supervisor.judge([])
    with group(tmp_path / "asked") as made, pytest.raises(StoppedUnsaved):
        made.supervisor.asked.append(15)
        made.supervisor.judge([KILLED])


def test_memory_that_the_kernel_took_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([0, 0, 1])  # when the supervisor is made, when the round begins, and now
    monkeypatch.setattr("shoestring.processes.group.supervisor.memory_kills", lambda: next(kills))
    with group(tmp_path) as made, pytest.raises(OutOfMemory, match="the kernel killed worker 1 of 2"):
        made.supervisor.judge([KILLED])


def test_workers_that_only_lost_each_other_are_no_deaths(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        made.goes_to(2)
        made.hears(0, PeerLostMessage("Timed out waiting 4000ms for recv operation to complete"))
        assert made.supervisor.missing({0: PEER_LOST, 1: None}) == []
        made.dies()
        warned = made.events[-1]
        assert isinstance(warned, Warned) and "lost each other after step 2 (one did not answer in time)" in warned.text
        assert made.supervisor.restarts == 1


def test_a_trial_whose_workers_waited_in_vain_is_not_repeated(tmp_path: Path) -> None:
    waited = PeerLostMessage(
        "stage 0 waited for the gradient of what body.1 gives on, from stage 1: it did not come", deadline=True
    )
    with group(tmp_path, task=TrialTask(file=str(tmp_path / "job.py"), together=True)) as made:
        made.hears(0, waited)
        with pytest.raises(
            Crashed,
            match=r"lost each other \(stage 0 waited for the gradient .*\): a worker stands still in the job, or "
            r"each waits for another, and it would come again",
        ):
            made.dies()
    with group(tmp_path / "training") as made:
        made.hears(0, waited)
        made.dies()
        assert made.supervisor.restarts == 1, "training goes on from its checkpoint"


def test_a_silent_worker_is_missed_later_while_it_still_imports(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        made.hears(1, WorkerJoined())
        for rank, seconds in ((0, 31.0), (1, 31.0)):
            made.supervisor.heard[rank] -= seconds
        found = made.supervisor.missing({0: None, 1: None})
        assert found is not None and [death.rank for death in found] == [1] and "no sign of life for 31" in found[0].why
        made.supervisor.heard[0] -= JOIN
        found = made.supervisor.missing({0: None, 1: None})
        assert found is not None and [death.rank for death in found] == [0, 1]


def test_only_training_in_a_folder_may_beat_for_ever_and_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    for folder, ends in (("", True), (tmp_path, False)):
        with group(tmp_path / f"{ends}", task=train_task(tmp_path / "job.py", 9, folder=folder)) as made:
            made.supervisor.told_at -= 1799
            made.hears(1, Heartbeat())
            assert made.supervisor.missing({0: None, 1: None}) is None
            made.supervisor.told_at -= 2
            with pytest.raises(NoAnswer, match="no result came for 30 min") if ends else nullcontext():
                made.supervisor.missing({0: None, 1: None})
            made.hears(1, WorkerJoined())
            assert made.supervisor.missing({0: None, 1: None}) is None


def test_all_is_well_while_workers_beat_and_when_they_are_done(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        assert made.supervisor.missing({0: None, 1: None}) is None
        made.hears(1, Answer({}))
        made.hears(0, Answer({"steps": 9}))
        assert made.supervisor.missing({0: 0, 1: 0}) is None and made.supervisor.finished([0, 1])
        assert made.supervisor.result().steps == 9


def test_a_machine_that_does_not_lead_tells_node_0_and_decides_nothing(tmp_path: Path) -> None:
    with group(tmp_path, rank=1, of=2) as made:
        made.hears(1, WRONG)
        made.supervisor.judge([KILLED])
        made.supervisor.send_signal(15)
        assert made.machines.told == [WRONG, KILLED, StopAsked()] and not made.events


def test_a_death_on_another_machine_is_counted_once_a_round(tmp_path: Path) -> None:
    with group(tmp_path, of=2) as made:
        made.machines.coming = [WorkerDied(3, "SIGKILL"), WorkerDied(4, "SIGKILL")]
        made.supervisor.listen()
        assert made.supervisor.restarts == 1 and [event.rank for event in made.events if isinstance(event, Died)] == [
            3,
            4,
        ]


def test_workers_read_the_round_that_the_launcher_wrote(tmp_path: Path) -> None:
    with group(tmp_path) as made:
        task, formed = read_round(tmp_path)
        assert (
            task == made.supervisor.task
            and formed.number == 0
            and formed.near
            and formed.fingerprint == made.supervisor.fingerprint
        )


def test_an_event_is_the_same_after_it_was_sent() -> None:
    event = Saved(3, "step-00000003", 0.5, 10, best=True, time=1.5)
    assert Happened(event_message(event).record).event == event
