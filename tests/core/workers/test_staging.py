"""What workers of a pipeline did when: put together from what each noted by its own clock."""

from __future__ import annotations

import pytest

from shoestring.core.files.codec import Unreadable, from_json, to_json
from shoestring.core.workers.actions import Action, ActionSpan, Kind, idle_share
from shoestring.core.workers.staging import OwnTimes, Staging, Work, WorkerTimes, together
from shoestring.runs.events.event import Adopted, Begun, StageTimes
from shoestring.runs.events.event_log import event_of, record_of
from shoestring.runs.events.history import History
from shoestring.training.pipeline.schedule import bubble, orders, timeline_of
from shoestring.training.pipeline.stages.step_clock import KEPT, StepClock


def seconds(action: Action) -> float:
    return 1.0 if action.kind is Kind.FORWARD else 2.0


def line_of(schedule: str = "1f1b", stages: int = 2, pieces: int = 4, steps: int = 5, slow: int = 0) -> list[OwnTimes]:
    """A line of workers whose clocks began at 100, and whose first `slow` steps take ten times as long on the last worker."""
    clocks = [StepClock(same_machine=True) for _ in range(stages)]
    for step in range(steps):
        much = 10.0 if step < slow else 1.0
        spans = timeline_of(
            orders(schedule, stages, pieces),
            lambda action, much=much: seconds(action) * (much if action.chunk else 1.0),
        )
        for clock, own in zip(clocks, spans, strict=True):
            clock.note([ActionSpan(one.action, 100 + one.begin, 100 + one.end) for one in own])
    return [clock.times for clock in clocks]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "naive"])
def test_the_measured_share_is_that_of_the_picture_and_of_the_formula(schedule: str) -> None:
    found = together(line_of(schedule))
    assert found is not None
    drawn = tuple(
        tuple(ActionSpan(Action(Kind(one.kind), one.piece, one.chunk), one.begin, one.end) for one in own)
        for own in found.timeline
    )
    assert found.idle == pytest.approx(idle_share(drawn)) == pytest.approx(bubble(schedule, 2, 4))
    assert min(work.begin for own in found.timeline for work in own) == 0.0, "a picture begins at zero"


def test_the_first_two_steps_which_are_tracked_do_not_count() -> None:
    slow, calm = together(line_of(slow=2, steps=4)), together(line_of(steps=4))
    assert slow is not None and calm is not None and slow.idle == calm.idle and slow.steps == 2
    young = together(line_of(slow=2, steps=1))
    assert young is not None and young.steps == 1 and young.idle != calm.idle, "where there is no other step, it counts"


def test_a_long_training_keeps_few_steps() -> None:
    clock = StepClock(same_machine=True)
    for number in range(KEPT + 7):
        clock.note([ActionSpan(Action(Kind.FORWARD, 0, 0), number, number + 0.5)])
    assert len(clock.times.steps) == KEPT and clock.times.before == 7


def test_workers_that_never_meet_are_idle_within_times_of_their_own() -> None:
    ahead, behind = (
        OwnTimes((Work("F", 7, chunk, begin, begin + 1),), (WorkerTimes(begin, begin + 4, 3.0),) * 3, drains=False)
        for chunk, begin in ((0, 0.0), (1, 50.0))
    )
    found = together([ahead, behind])
    assert found is not None and found.idle == 0.25, "the 50 seconds between them are no idle time"
    assert found.timeline[0][0].piece == 0, "pieces are counted from the first in the picture"


def test_a_worker_that_did_nothing_has_no_picture() -> None:
    assert together([]) is None and together([OwnTimes(), line_of()[1]]) is None


def test_what_was_measured_is_an_event_that_is_read_back() -> None:
    found = together(line_of())
    assert found is not None
    event = StageTimes(5, found.idle, found.steps, found.timeline, (7, 9), time=1.0)
    assert event_of(record_of(event)) == event
    for wrong in (["F", 0, 0, 1.0], ["F", "0", 0, 1.0, 2.0], "F0012", 3):
        with pytest.raises(Unreadable):
            Work.from_json(wrong)
        assert event_of(record_of(event) | {"timeline": [[wrong]]}) is None
    assert from_json(StageTimes, to_json(event)) == event


def test_the_last_picture_counts_until_another_plan_is_taken() -> None:
    history = History()
    for event in (Begun(steps=9, step=0), StageTimes(5, 0.2, 3), StageTimes(9, 0.3, 7)):
        history.add(event)
    assert history.timed == StageTimes(9, 0.3, 7) and not any(isinstance(one, StageTimes) for one in history.others)
    history.add(Adopted(("another plan",)))
    assert history.timed is None


def test_a_staging_names_the_blocks_of_every_chunk() -> None:
    assert Staging((1, 2), "1f1b", 4, 0.2, names=("a", "b", "c")).blocks == (("a",), ("b", "c"))
