"""What other processes did to a timing is known from the scheduler, and which timings count follows from numbers alone."""

from __future__ import annotations

import pytest

from shoestring.measure.load import HELD_UP, Effort, Timing, believed_timings, busy_share, effort, enough, timing

QUIET = Timing(1.0, ran=2.0, waited=0.02)  # two threads for a second, hardly in the queue
BUSY = Timing(4.0, ran=2.0, waited=6.0)  # the same work with a quarter of the cores
WORSE = Timing(20.0, ran=4.0, waited=36.0)  # the same, and threads that spun for each other


@pytest.mark.parametrize(
    ("one", "held_up", "alone"),
    [
        (QUIET, 0.02 / 2.02, 2.0 / 2.02),
        (BUSY, 0.75, 1.0),
        (WORSE, 0.9, 2.0),
        (Timing(3.0, ran=1.0), 0.0, 3.0),  # it slept, for data or a disk: nobody held it up
        (Timing(0.0, ran=0.0), 0.0, 0.0),
    ],
)
def test_time_in_the_queue_is_taken_off_and_time_asleep_is_not(one: Timing, held_up: float, alone: float) -> None:
    assert one.held_up == pytest.approx(held_up) and one.alone == pytest.approx(alone)


@pytest.mark.parametrize(
    ("timings", "counted", "busy"),
    [
        ([QUIET, QUIET], [0, 1], 0.02 / 2.02),
        ([BUSY, QUIET, WORSE], [1], 0.02 / 2.02),
        ([WORSE, BUSY], [1], 0.75),
        ([WORSE], [0], 0.9),
    ],
)
def test_what_was_hardly_held_up_counts_else_what_was_least(
    timings: list[Timing], counted: list[int], busy: float
) -> None:
    assert believed_timings(timings) == counted and busy_share(timings) == pytest.approx(busy)


@pytest.mark.parametrize(
    ("timings", "done"),
    [
        ([[QUIET] * 2, [QUIET] * 2], True),
        ([[QUIET] * 2, [BUSY] * 2], False),  # one of the two was always held up
        ([[QUIET] * 2, [BUSY, QUIET]], True),
        ([[QUIET], [QUIET]], False),  # too few
        ([[BUSY] * 8, [BUSY] * 8], True),  # it does not get better
    ],
)
def test_a_busy_machine_is_timed_more_often_but_not_for_ever(timings: list[list[Timing]], done: bool) -> None:
    assert enough(timings, count=2, most=8) == done


def test_the_kernel_counts_what_this_process_ran() -> None:
    before = effort()
    while sum(number * number for number in range(1000)) and effort().ran <= before.ran:
        pass
    after = effort()
    assert after.ran > before.ran > 0
    assert timing(1.0, Effort(5.0, 3.0), Effort(4.0, 3.5)) == Timing(1.0, 0.0, 0.5), (
        "a thread that ended takes its seconds with it"
    )
    assert 0 < HELD_UP < 0.5
