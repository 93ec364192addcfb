"""What was measured of a run: one definition for the worker's result, the page and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.runs.events.event import Adopted, Begun, Event, Measured, Stepped
from shoestring.runs.events.history import History, largest_life, measured_by, measured_figures
from shoestring.runs.events.time_left import time_left
from shoestring.runs.reports.report import report_of
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from tests.records import records
from tests.training.members import Group

JOB = Path(__file__).parents[2] / "training" / "data_parallel" / "straggling.py"


def step(number: int, seconds: float, most: int = 100, moved: int | None = None, sent: int | None = None) -> Stepped:
    return Stepped(number, 0.0, seconds, most, most, moved, sent)


def history_of(*events: Event) -> History:
    history = History()
    for event in events:
        history.add(event)
    return history


def figures(*events: Event) -> dict[str, float]:
    return measured_figures(history_of(*events))


def begun(at: int) -> Begun:
    return Begun(step=at, steps=9)


def test_the_first_two_steps_of_every_life_are_not_the_pace_of_a_run() -> None:
    lives = [
        begun(0),
        step(1, 9.0),
        step(2, 9.0),
        step(3, 1.0),
        step(4, 8.0),
        begun(3),
        step(4, 9.0),
        step(5, 9.0),
        step(6, 2.0),
        step(7, 3.0),
    ]
    assert figures(*lives)["step_seconds"] == 2.0, (
        "of 1, 2 and 3; the fourth was done again, in its second life's youth"
    )
    assert figures(*lives[:3])["step_seconds"] == 9.0, "there are no others"
    assert figures() == {}


def test_how_much_other_processes_held_the_steps_up_is_measured_with_them() -> None:
    looks = [replace(step(number, 1.0), held_up=share) for number, share in enumerate((0.9, None, 0.5, None), 1)]
    assert figures(begun(0), *looks)["held_up"] == pytest.approx(0.7)
    assert "held_up" not in figures(begun(0), step(1, 1.0))


def test_batches_that_come_together_count_with_the_mean_of_their_steps() -> None:
    """Four processes load a batch each: one step waits for all four, and the other three for none."""
    waits = [9.0, 9.0, *[0.1, 0.1, 0.1, 2.1] * 5]
    steps = [step(number + 1, seconds) for number, seconds in enumerate(waits)]
    assert figures(begun(0), *steps)["step_seconds"] == 0.1
    loading = Begun(step=0, steps=22, together=4)
    assert figures(loading, *steps)["step_seconds"] == pytest.approx(0.6)
    assert time_left(22, 32, waits, together=4) == pytest.approx(6.0)


def test_bytes_sent_are_the_mean_of_all_steps_and_bytes_of_the_disk_those_of_a_settled_one() -> None:
    steps = [step(number, 1.0, sent=8 * (number % 4 == 0), moved=5 if number == 1 else 50) for number in range(1, 9)]
    found = figures(begun(0), *steps)
    assert found["sent_bytes"] == 2 and found["traffic_bytes"] == 50


def test_what_was_before_another_plan_was_adopted_does_not_count() -> None:
    old = [begun(0), Measured(9), step(1, 1.0, most=900), step(2, 1.0, most=900)]
    new = [Adopted(), begun(2), Measured(5, where="there"), step(3, 4.0)]
    assert figures(*old, *new) == {"peak_bytes": 5, "flops": 0.0, "process_bytes": 100, "step_seconds": 4.0}
    assert largest_life(history_of(*old, *new)) == Measured(5, where="there")
    assert figures(*old, new[0], new[1])["process_bytes"] == 900, "of the new one nothing is known yet"


def test_of_workers_that_do_not_wait_the_largest_counts_and_each_by_its_own_steps() -> None:
    server = {"peak_bytes": 10, "process_bytes": 70, "steps": 4, "sent": 80}
    workers = [
        {"peak_bytes": 30, "where": "here", "process_bytes": 60, "steps": 3, "sent": 30},
        {"peak_bytes": 20, "process_bytes": 65, "steps": 1, "sent": 10},
        {"peak_bytes": 0, "process_bytes": 5, "steps": 0, "sent": 0},
    ]
    assert measured_by([server, *workers]) == Measured(30, where="here", process_bytes=70, sent_by_others_bytes=10)
    told = [begun(0), step(1, 1.0, most=50), measured_by([server, *workers])]
    assert figures(*told)["process_bytes"] == 70 and figures(*told)["sent_by_others_bytes"] == 10


def test_the_worker_and_the_report_tell_the_same_figures_of_a_run_that_was_begun_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    _, second = (
        Group(tmp_path, 1, JOB, [OffloadActivations()], steps, folder=str(folder), cadence={"steps": 2}).results()[0][
            "measured"
        ]
        for steps in (4, 8)
    )
    assert [event["step"] for event in records(folder) if event["event"] == "begun"] == [0, 4]
    assert second == report_of(folder).measured, "of both lives, though the worker has seen one"
    assert {"peak_bytes", "process_bytes", "step_seconds"} <= second.keys()
