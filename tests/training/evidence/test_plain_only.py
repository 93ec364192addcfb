"""What shoestring can't look at still trains plainly: the plan says so, and the weights are those of plain training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job, Mistake, OverBudget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Crashed, JobFailed
from shoestring.jobfile import load_job
from shoestring.processes.task import Task
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.events.event import Measured, Warned
from shoestring.runs.events.event_log import read
from shoestring.training.evidence.tasks import TrialResult, TrialTask
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.plan import load_plan
from shoestring.training.planning.planner import Planner
from tests.commands.test_main import answer

# One look of ours after the other, by where it is called from
LOOKS = (
    "shoestring.training.evidence.rehearse.blocks",
    "shoestring.training.evidence.rehearse.generators_of",
    "shoestring.training.evidence.rehearse.Holders.find",
    "shoestring.measure.tracker.Tracker.see",
    "shoestring.measure.tracker.Tracker.find_place",
    "shoestring.measure.holdings.tensors_in",
    "shoestring.core.running.run.try_stepping",
    "shoestring.training.evidence.gather.try_in_pieces",
    "shoestring.training.evidence.gather.why_not_again",
    "shoestring.training.evidence.gather.plain_ledger",
    "shoestring.training.planning.planner.look",
)


class Strange(Exception):
    """What nobody expects."""


def fail(*given: Any, **named: Any) -> Any:
    raise Strange("a look that went wrong")


def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((4, 4), float(number)), torch.zeros(4, 4)) for number in range(1, 5)]


def loss(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean()


def made_job(model: Callable[[], nn.Module] | None = None) -> Job:
    def blocks():
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4)) for _ in range(3)))

    return Job(model=model or blocks, data=data, loss=loss, steps=4)


def trained(job: Job, plan: Any, **named: Any) -> str:
    """The digest of the weights that a plan leads to."""
    torch.manual_seed(job.seed)
    model = job.model()
    assert len(list(shoestring.train(job, plan, model, **named))) == 4
    return weights_sha256(model.state_dict())


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_that_fails_leaves_plain_training(look: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = made_job()
    plain = trained(job, ())
    monkeypatch.setattr(look, fail)
    outcome = shoestring.plan(job)
    assert not outcome.chosen.techniques and not outcome.chosen.details.looked
    assert "could not look at this model (Strange: a look that went wrong (" in outcome.chosen.basis
    assert "plain training works" in str(outcome) and "not known" in str(outcome)
    assert trained(job, outcome) == trained(job, ()) == plain
    assert trained(job, outcome, run=tmp_path / "run") == plain, "nor is it tracked in a folder"
    with pytest.raises(Mistake, match=r"Checkpoint.* can't be used for this job: shoestring could not look"):
        shoestring.plan(job, use=[Checkpoint(every=1)])
    with pytest.raises(Mistake, match="plain training by one worker works"):
        shoestring.plan(job, devices=2)


def test_a_failure_of_our_own_is_told_with_our_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoestring.training.evidence.rehearse.blocks", itemgetter("nothing")
    )  # fails without a frame of its own
    assert "as an integer (training/evidence/rehearse.py line" in shoestring.plan(made_job()).chosen.basis


def test_a_machine_that_can_not_be_measured_still_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.training.execution.job_planning.known_hardware", fail)
    outcome = shoestring.plan(made_job())
    assert (
        "could not look at this machine (Strange" in outcome.chosen.basis
        and len(list(shoestring.train(made_job(), outcome))) == 4
    )
    with pytest.raises(Mistake, match="could not look at this machine"):
        shoestring.plan(made_job(), use=[Checkpoint(every=1)])


def test_a_choice_that_fails_leaves_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.training.planning.planner.TrainingRoom", fail)
    assert not shoestring.plan(made_job()).chosen.details.looked
    assert shoestring.plan(made_job(), use=[Checkpoint(every=1)]).chosen.details.looked, "nothing was chosen there"


# Of the tracker, by where it is called from while training
TRACKING = (
    "measure.tracker.Tracker.see",
    "measure.tracker.Tracker.find_place",
    "measure.tracker.Tracker.leave",
    "measure.tracker.hold_run",
    "measure.tracker.see_gradients",
    "measure.tracker.Tracker.see_result",
    "measure.tracker.Tracker.alive",
    "measure.holdings.tensors_in",
    "training.execution.training.peak",
)


@pytest.mark.parametrize("look", TRACKING)
def test_tracking_that_fails_while_training_is_told_and_changes_nothing(
    look: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = replace(made_job(), held_out=data, every="2 steps")
    outcome = shoestring.plan(job, use=[Checkpoint(every=1)])
    plain = trained(job, outcome)
    monkeypatch.setattr(f"shoestring.{look}", fail)
    assert trained(job, outcome, run=tmp_path / "run") == plain
    events = read(tmp_path / "run").events
    told = [one.text for one in events if isinstance(one, Warned) and "more memory than plain" not in one.text]
    assert len(told) == 1 and "could not track the memory of this training (Strange: a look that went wrong" in told[0]
    assert not any(
        isinstance(one, Measured) and one.peak_bytes
        for one in events[events.index(next(one for one in events if isinstance(one, Warned))) :]
    )


def test_the_library_fits_and_verifies_what_it_can_not_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.training.evidence.rehearse.blocks", fail)
    job = made_job()
    model = job.model()
    fitted = shoestring.fit(model, loss, data())
    assert not fitted.outcome.chosen.details.looked and len(fitted.losses) == 4
    assert shoestring.verify(job, shoestring.plan(job)).same_bits
    with pytest.raises(Mistake, match="could not look at this model"):
        list(shoestring.train(job, (Checkpoint(every=1),)))


def test_a_plan_without_a_look_is_read_back_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shoestring.training.evidence.rehearse.blocks", fail)
    shoestring.plan(made_job()).chosen.save(tmp_path / "plan.json")
    assert not load_plan(tmp_path / "plan.json").details.looked


class Hostile:
    """An object of which nothing can be asked."""

    def __getattribute__(self, name: str) -> Any:
        raise Strange(f"nobody asks for {name}")

    def refuse(self, *given: Any) -> Any:
        raise Strange("nobody does that")

    __len__ = __iter__ = __bool__ = __eq__ = __hash__ = __repr__ = __str__ = __deepcopy__ = __reduce_ex__ = __call__ = (
        __getitem__
    ) = refuse  # type: ignore[assignment]


class Holding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.__dict__["own"] = Hostile()  # torch itself asks what is set
        self.many = [Hostile(), {"one": Hostile()}]


def test_a_model_with_hostile_attributes_trains_as_without_a_plan() -> None:
    job = made_job(lambda: nn.Sequential(Holding(), nn.Tanh(), Holding()))
    assert trained(job, shoestring.plan(job)) == trained(job, ())


class OnlyAlone(nn.Linear):
    """Runs where no mode looks on at its operations, and nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("INTERNAL ASSERT FAILED at csrc/strange.cpp:12")
        return super().forward(x)


def test_a_model_that_fails_only_where_somebody_looks_on_is_not_blamed() -> None:
    job = made_job(lambda: nn.Sequential(OnlyAlone(4, 4), nn.Tanh(), OnlyAlone(4, 4)))
    outcome = shoestring.plan(job)
    assert not outcome.chosen.details.looked and "INTERNAL ASSERT" in outcome.chosen.basis
    assert trained(job, outcome) == trained(job, ())


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise Strange("of the job itself")


def test_a_job_that_fails_plainly_is_not_a_limit_of_ours() -> None:
    with pytest.raises(Strange, match="of the job itself"):
        shoestring.plan(made_job(lambda: nn.Sequential(Broken(4, 4))))


def test_what_is_asked_for_wrongly_stays_a_mistake() -> None:
    with pytest.raises(Mistake, match="must be one number"):
        shoestring.plan(Job(model=lambda: nn.Linear(4, 4), data=data, loss=lambda output, batch: output, steps=4))


WHOLE = """
import torch
from shoestring import Job

def job() -> Job:
    return Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 4)),
               data=lambda: [(torch.ones(4, 4), torch.zeros(4, 4))] * 4, loss=lambda output, batch: output.square().mean(), steps=3)
"""
SABOTAGE = """
from shoestring.measure.tracker import Tracker

def strange(*given, **named):
    raise RuntimeError("a look that went wrong")

Tracker.see = strange
"""


def planner(file: Path, answer: Callable[[Task[Any]], Any]) -> Planner:
    """Of a job file whose tasks are answered so."""
    return Planner(load_job(str(file), {}), Hardware(), lambda task, environment: answer(task))


def test_plain_steps_say_whether_it_is_the_job_that_fails_and_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(WHOLE)

    def crashes(task: Task[Any]) -> Any:
        if isinstance(task, TrialTask) and not task.tracked:
            return TrialResult(100 << 20, 0.5, 3)
        raise Crashed("a fault of shoestring in measure/tracker.py line 1: KeyError: 3")

    chosen = planner(tmp_path / "net.py", crashes).outcome(1 << 30).chosen
    assert (chosen.predicted["process_bytes"], chosen.predicted["step_seconds"], chosen.details.looked) == (
        100 << 20,
        0.5,
        False,
    )
    assert "could not look at this model (a fault of shoestring in measure/tracker.py line 1" in chosen.basis
    with pytest.raises(OverBudget, match=r"plain training needs 100 MiB, more than the 50\.0 MiB"):
        planner(tmp_path / "net.py", crashes).outcome(50 << 20)

    def fails(task: Task[Any]) -> Any:
        raise JobFailed(f"the job failed in {task.kind}")

    with pytest.raises(JobFailed, match=r"failed in trial$"):
        planner(tmp_path / "net.py", fails).outcome(1 << 30)
    samples = WHOLE.replace("torch.ones(4, 4), torch.zeros(4, 4)", "torch.ones(4), 1")
    (tmp_path / "samples.py").write_text(samples)
    with pytest.raises(JobFailed, match=r"failed in trial; the job's data are a list .* collate="):
        planner(tmp_path / "samples.py", fails).outcome(1 << 30)


@pytest.mark.usefixtures("warm_workers")
def test_a_job_file_trains_plainly_where_every_look_in_every_process_fails(tmp_path: Path) -> None:
    file, whole = tmp_path / "net.py", tmp_path / "whole.py"
    file.write_text(WHOLE + SABOTAGE)
    whole.write_text(WHOLE)
    outcome = answer("plan", file, "--save", tmp_path / "plan.json", cwd=tmp_path)
    chosen = outcome["chosen"]
    assert (
        not chosen["techniques"]
        and chosen["details"]["looked"] is False
        and "could not look at this model" in chosen["basis"]
    )
    assert chosen["process_bytes"] > 0 and chosen["step_seconds"] > 0, "those of plain steps"
    report = answer("train", file, cwd=tmp_path)
    assert report["weights_sha256"] == answer("train", whole, cwd=tmp_path)["weights_sha256"]
    assert report["measured"].get("peak_bytes") is None
    assert answer("verify", file, cwd=tmp_path)["bit_equal"]
