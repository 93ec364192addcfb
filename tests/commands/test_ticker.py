"""A log gets a line at least every ten seconds, of whatever takes long: planning, making the model, a step."""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.command_line.command import Call
from shoestring.core.job import Job
from shoestring.runs.events.event import Begun, Stepped
from shoestring.runs.folder import Folder
from shoestring.runs.request import Request
from shoestring.runs.resume import OpenedRun
from shoestring.show.moving_line import MovingLine
from shoestring.show.terminal import Screen
from shoestring.show.ticker import LONGEST, LOOKS, Ticker
from shoestring.training.commands.progress import Shower


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_takes_long_is_told_again_and_again_and_never_later_than_ten_seconds(clock: Clock) -> None:
    said: list[tuple[float, str]] = []
    ticker = Ticker(lambda text: said.append((clock.now, text)), clock)
    ticker.begin("planning: trying 3 real steps")
    while clock.now < 60:
        ticker.tick()
        clock.now += LOOKS
    times = [0.0, *(when for when, _ in said), clock.now]
    assert max(after - before for before, after in pairwise(times)) <= 10 - LOOKS
    assert (
        said[0][1] == "planning: trying 3 real steps, 9 s so far …"
        and said[-1][1] == "planning: trying 3 real steps, 54 s so far …"
    )


def test_a_terminal_too_is_told_since_when_nothing_came(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.show.moving_line.screen", lambda stream: Screen(40))
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    line = MovingLine(stream)
    ticker = Ticker(line.remind, clock)
    line.show("step 12")
    ticker.begin("training, after step 12")
    clock.now += 130
    ticker.tick()
    assert line.shown == "training, after step 12, 2 min so far …"


def test_who_says_something_is_not_interrupted(clock: Clock) -> None:
    said: list[str] = []
    ticker = Ticker(said.append, clock)
    ticker.begin("training")
    for _ in range(20):
        clock.now += LONGEST / 2
        ticker.note_line()
        ticker.tick()
    assert not said


@pytest.mark.parametrize("json", [True, False])
def test_slow_steps_have_a_line_each_in_a_log_and_quick_ones_every_tenth(
    json: bool, clock: Clock, tmp_path: Path
) -> None:
    stream = io.StringIO()
    line = MovingLine(stream)
    ticker = Ticker(line.say, clock)
    held: Any = OpenedRun(Folder(tmp_path), None, Request(job="/my.py"), True)  # type: ignore[arg-type]
    shower = Shower(Call("train", json=json), line, Job(model=lambda: None, data=list, steps=40), held, ticker)  # type: ignore[arg-type, return-value]
    for said in ("training: making the model, 10 s so far …\n", "training: the first step, 10 s so far …\n"):
        clock.now += 10
        ticker.tick()
        assert stream.getvalue().endswith(said)
        shower(Begun(pid=1, steps=40, step=0, how=""))
    for step in range(1, 41):
        clock.now += 10.0 if step > 20 else 0.1
        shower(Stepped(step, 0.5, 0.1, 1, 1))
    told = [text.split("/40")[0].split()[-1] for text in stream.getvalue().splitlines()[2:]]
    assert told == [*([] if json else ["1", "10", "11", "20"]), *map(str, range(21, 41))]


def test_a_log_of_a_long_run_stays_short(clock: Clock, tmp_path: Path) -> None:
    stream = io.StringIO()
    held: Any = OpenedRun(Folder(tmp_path), None, Request(job="/my.py"), True)  # type: ignore[arg-type]
    job = Job(model=lambda: None, data=list, steps=20_000)  # type: ignore[arg-type, return-value]
    shower = Shower(Call("train"), MovingLine(stream), job, held, Ticker(print, clock))
    for step in range(1, 20_001):
        shower(Stepped(step, 0.5, 0.1, 1, 1))
    assert stream.getvalue().count("\n") == 200


def test_planning_is_told_aloud_while_the_job_is_overheard_in_silence(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The command makes both; a line that was made inside of the silence would be silent."""
    from shoestring.processes.nodes import Team
    from shoestring.training.commands.job_flags import plan_for
    from shoestring.training.execution import job_planning
    from shoestring.training.options import PlanOptions

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    def plan(*given: Any, on_progress: Any, **more: Any) -> Any:
        print("the job says")
        on_progress("rehearsing plain", 30.0)
        assert (
            "planning, about 30 s: rehearsing plain …" in stream.getvalue() and "the job says" not in stream.getvalue()
        )
        raise StopIteration

    monkeypatch.setattr(job_planning, "plan_job", plan)
    with pytest.raises(StopIteration):
        plan_for(Call("train"), None, PlanOptions(), Team(), silent=True)  # type: ignore[arg-type]
