"""One lifecycle for every run: what a session leaves in its folder, however what it runs ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.planning.plan import Outcome, Plan, read_plan
from shoestring.runs.checkpoints.cadence import Cadence, cadence_of
from shoestring.runs.events.event import Adopted, Begun, Failed, Finished, Saved, Stopped, Warned
from shoestring.runs.events.event_log import note, read
from shoestring.runs.folder import Unusable
from shoestring.runs.reports.report import Report
from shoestring.runs.request import Request
from shoestring.runs.resume import open_run
from shoestring.runs.session import Execution, Session, kept_plan
from shoestring.show.watch.follow import Watch


def draw(told: Report) -> str:
    return f"<p>{told.state}</p>"


def session(path: Path, by_script: bool = False, said: list[str] | None = None) -> Session:
    told = [] if said is None else said
    return Session(open_run(path, Request(job="job.py"), b"", False, False), draw, told.append, by_script)


def begin(path: Path) -> None:
    note(path, Begun(steps=4, step=0))
    note(path, Saved(step=2, checkpoint="step-00000002"))


def fails_with(error: BaseException) -> None:
    raise error


Nothing = Plan[Any, None]


def a_plan(name: str) -> Nothing:
    return Nothing((), Exactness.BITS, {}, None, basis=name)


@dataclass(frozen=True)
class End:
    unfinished: bool = False


@dataclass
class Walk(Execution[Nothing, End]):
    """Notes what a session asks of it. `fails`, `stops`: how it ends."""

    folder: Path
    name: str = "first"
    adopt: bool = False
    stops: bool = False
    fails: BaseException | None = None
    refuses: str = ""  # a kept plan that it does not go on with
    said: list[str] = field(default_factory=list)

    def read_plan(self, file: Mapping[str, Any]) -> Nothing:
        return read_plan(file, lambda name, knobs: None, (), type(None))  # type: ignore[arg-type,return-value]

    def accept(self, kept: Nothing) -> Nothing | None:
        return None if kept.basis == self.refuses else kept

    def choose(self) -> Outcome[Nothing]:
        self.said.append("choose")
        return Outcome(replace(a_plan(self.name), warnings=("mind the step",)))

    def note_plan(self, outcome: Outcome[Nothing]) -> None:
        self.said.append(f"kept: {(self.folder / 'plan.json').exists()}")

    def execute(self, plan: Nothing) -> End:
        self.said.append(f"execute {plan.basis}")
        begin(self.folder)
        if self.fails:
            raise self.fails
        note(self.folder, Stopped(text="stopped") if self.stops else Finished(step=4))
        return End(self.stops)

    def report(self, plan: Nothing, ended: End) -> Mapping[str, Any]:
        return {"losses": [1.0], "plan": plan.basis}


def test_a_run_that_ends_is_reported_and_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with session(path) as first:
        walk = Walk(path)
        assert first.play(walk).report == {"losses": [1.0], "plan": "first"}
        assert walk.said == ["choose", "kept: True", "execute first"], "whoever is killed goes on with this plan"
    assert (path / "report.html").read_text() == "<p>finished</p>"
    assert [one.text for one in read(path).events if isinstance(one, Warned)] == ["mind the step"]
    (path / "report.html").unlink()
    with session(path) as again:
        walk = Walk(path)
        played = again.play(walk)
        assert played.report == {"losses": [1.0], "plan": "first"} and played.ended is None and not walk.said
    assert (path / "report.html").exists()


def test_a_run_that_stopped_goes_on_with_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with session(path) as one:
        played = one.play(Walk(path, stops=True))
        assert played.report is None and played.ended == End(True) and not (path / "report.json").exists()
    with session(path) as one:
        again = Walk(path, "second")
        assert one.play(again).report == {"losses": [1.0], "plan": "first"} and again.said == ["execute first"]


def test_a_plan_that_is_not_accepted_any_more_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with session(path) as one:
        one.play(Walk(path, stops=True))
    with session(path) as one:
        again = Walk(path, "second", refuses="first")
        assert one.play(again).report == {"losses": [1.0], "plan": "second"} and again.said[0] == "choose"


def test_a_room_that_keeps_no_plan_plans_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for name in ("first", "second"):
        with session(path) as one:
            walk = Walk(path, name, stops=name == "first")
            walk.keeps_plan = False  # type: ignore[misc]
            one.play(walk)
            assert walk.said[-1] == f"execute {name}"


def test_a_second_session_is_refused_until_the_first_is_left(tmp_path: Path) -> None:
    with session(tmp_path / "run"), pytest.raises(Mistake, match="in use by process"):
        session(tmp_path / "run")
    session(tmp_path / "run").held.lock.release()


def test_a_mistake_before_the_first_step_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(Mistake), session(tmp_path / "run") as one, one.noting_failure():
        raise Mistake("no")
    assert not (tmp_path / "run").exists()


def test_a_fault_of_ours_before_the_first_step_is_kept_for_a_command_and_not_for_a_script(tmp_path: Path) -> None:
    for by_script in (False, True):
        with pytest.raises(RuntimeError), session(tmp_path / "run", by_script) as one, one.noting_failure():
            fails_with(RuntimeError("ours"))
        assert (tmp_path / "run").exists() != by_script


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Mistake("too small"), Failed, "too small"),
        (RuntimeError("ours"), Failed, "ours"),
        (KeyboardInterrupt(), Stopped, "stopped at once"),
    ],
)
def test_what_ends_a_run_early_is_noted_once(error: BaseException, kind: type, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(type(error)), session(path) as one:
        begin(path)
        with one.noting_failure():
            fails_with(error)
    last = read(path).events[-1]
    assert isinstance(last, kind) and text in vars(last)["text"]
    with pytest.raises(type(error)), session(path) as one:
        note(path, Begun(steps=4, step=2))
        note(path, Failed("the worker said so"))
        with one.noting_failure():
            fails_with(error)
    events = read(path).events
    assert len(events) == 5 and events[-1] == Failed("the worker said so", time=events[-1].time)


def test_a_report_that_can_not_be_written_is_told_of_and_costs_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with session(tmp_path / "run", said=said) as one:
        begin(one.folder.path)
        (one.folder.path / "report.json").mkdir()
        (one.folder.path / "report.html").mkdir()
        one.finish({"losses": []})
        one.write_page()
    assert len(said) == 2 and "give the same command" in said[0] and "report.html can't be written" in said[1]


def test_a_damaged_plan_is_never_run_and_adopt_plans_anew(tmp_path: Path) -> None:
    with session(tmp_path / "run") as one:
        assert kept_plan(one.folder, dict) is None
        one.folder.write("plan.json", {"chosen": {"name": "plain"}})
        assert kept_plan(one.folder, lambda found: found["chosen"]["name"]) == "plain"
        for read_as in (lambda found: found["gone"], lambda found: fails_with(Mistake("of a newer version"))):
            with pytest.raises(Unusable, match="--adopt plans anew"):
                kept_plan(one.folder, read_as)
            assert kept_plan(one.folder, read_as, adopt=True) is None
        assert isinstance(read(one.folder.path).events[-1], Adopted)


def test_a_session_is_watched_while_it_is_held(tmp_path: Path) -> None:
    with session(tmp_path / "run") as one:
        begin(one.folder.path)
        followed = Watch([tmp_path]).runs["run"]
        followed.look(0.0)
        assert followed.state == "running"


@pytest.mark.parametrize(
    ("written", "found"), [("50", Cadence(steps=50)), (4, Cadence(steps=4)), ("1h", Cadence(seconds=3600.0))]
)
def test_how_often_a_run_is_saved(written: int | str, found: Cadence) -> None:
    assert cadence_of(written) == found


@pytest.mark.parametrize("written", ["soon", "0", "1.5", "1 epoch", ""])
def test_how_often_no_run_can_be_saved(written: str) -> None:
    with pytest.raises(Mistake, match="write a number of steps"):
        cadence_of(written)
    with pytest.raises(Mistake, match="--keep 0"):
        cadence_of(4, keep=0)
