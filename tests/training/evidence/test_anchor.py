"""A measurement that other processes held up is corrected, marked, told and made again, and does not favour a technique."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.budget import Budget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.exactness import Exactness
from shoestring.measure.load import Timing
from shoestring.planning.answers import MeasuredAnswers, open_answers
from shoestring.planning.choose import Chooser, best_first, requested_candidate
from shoestring.training import library as api
from shoestring.training.evidence import anchor as anchor_file
from shoestring.training.evidence.anchor import StepTimes, measure_anchor, pace, typical, why_not_again
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import AnchorResult, AnchorStep, AnchorTask, TrialResult
from shoestring.training.execution import job_planning
from shoestring.training.library import verify
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from shoestring.training.planning.predict import Predictor
from shoestring.training.room import ROOM, TrainingRoom, combinations
from tests.models import job as example
from tests.training.evidence.test_earlier import MACHINE, anchor, ledger_of, logs

JOB = """
import torch
from torch import nn
from shoestring import Job

def job(width: int = 32, lr: float = 0.1, share: float = 0.0) -> Job:
    def forward(model, batch):
        return model(batch[0]) if share == 0 else model(batch[0]) * share
    return Job(model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)], nn.Linear(width, 4)),
               data=lambda: [(torch.zeros(8, width), torch.zeros(8, dtype=torch.long))] * 4, forward=forward,
               optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr), steps=4)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file, an empty cache, and a machine that is as fast each time."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(job_planning, "known_hardware", lambda dtypes=False: Hardware())
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


class Worker:
    """A worker that measures nothing: steps take what it is told, one time after the other."""

    def __init__(self, *steps: tuple[float, float]) -> None:
        self.steps, self.asked, self.waiting = list(steps), [], 0.0  # type: ignore[var-annotated]
        self.tasks: list[Any] = []

    def __call__(self, task: Any, environment: Mapping[str, str]) -> Any:
        self.asked.append(task.kind)
        self.tasks.append(task)
        if not isinstance(task, AnchorTask):
            return TrialResult(300 << 20, 1.0, 4)
        seconds, busy = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        times = {
            "step": seconds,
            "update (update)": 0.1 * seconds,
            "forward 0": 0.3 * seconds,
            "backward 0": 0.6 * seconds,
        }
        step = AnchorStep(
            times, 300 << 20, probes={"fused": 0.09 * seconds, "call": 0.0}, overheads={"": 250 << 20}, busy=busy
        )
        return AnchorResult(dict.fromkeys(task.variants, step), waiting=self.waiting)


def test_a_held_up_step_counts_without_its_time_in_the_queue_and_a_quiet_one_as_it_is() -> None:
    held_up = Timing(13.8, ran=0.96, waited=27.0)
    quiet, parts = Timing(0.5, ran=1.0), {("forward", "0"): [0.2], ("backward", "0"): [0.3]}
    slow = {("forward", "0"): [8.0], ("backward", "0"): [5.8]}
    only = typical([held_up], [slow])
    assert only.step == pytest.approx(13.8 * 0.96 / 27.96) and only.busy == pytest.approx(27 / 27.96)
    assert only.times["forward 0"] == pytest.approx(8 * 0.96 / 27.96) and only.by_clock == pytest.approx(13.8)
    both = typical([held_up, quiet, quiet], [slow, parts, parts])
    assert both.times == {"forward 0": 0.2, "backward 0": 0.3, "step": 0.5} and both.busy == both.spread == 0


def test_a_batch_in_pieces_is_not_faster_for_having_met_a_quieter_moment() -> None:
    whole = typical([Timing(13.8, 0.96, 27.0)], [{("update", "(update)"): [0.1]}])
    piece = typical([Timing(0.1, 0.2)], [{("update", "(update)"): [0.01]}])
    assert pace(whole, piece, 2) == 1.0 and pace(piece, piece, 2) == 2.0 and pace(piece, whole, 2) > 4


def answer(kept: MeasuredAnswers, seconds: float, busy: float) -> tuple[float, float]:
    step = AnchorStep({"step": seconds}, busy=busy)
    found = kept.by_worker({"task": "anchor"}, AnchorResult, lambda: AnchorResult({"": step})).steps[""]
    kept.save()
    return found.times["step"], found.busy


def test_what_was_timed_on_a_busy_machine_is_timed_again_and_the_less_held_up_counts(file: Path) -> None:
    assert answer(open_answers({"job": 1}, 1.0), 13.8, 0.9) == (13.8, 0.9)
    assert answer(open_answers({"job": 1}, 1.0), 9.0, 0.95) == (13.8, 0.9), "worse still"
    assert answer(open_answers({"job": 1}, 1.0), 0.48, 0.02) == (0.48, 0.02)
    assert answer(open_answers({"job": 1}, 1.0), 7.0, 0.0) == (0.48, 0.02), "a quiet one is not made again"


def test_a_busy_measurement_does_not_decide_the_plan_is_told_and_is_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker((13.8, 0.9), (0.5, 0.0))
    monkeypatch.setattr(job_planning, "run_worker", worker)
    first = api.plan(file, memory="8GiB")
    assert not first.chosen.techniques and worker.asked == ["anchor"], (
        "plain fits with room: one step is measured, nothing is tried"
    )
    assert (
        "90% of the time they waited for a core" in first.chosen.basis
        and "measured again next time" in first.chosen.basis
    )
    again = api.plan(file, memory="8GiB")
    assert (
        worker.asked == ["anchor"] * 2
        and again.plain.predicted["step_seconds"] == pytest.approx(0.5)
        and "waited" not in again.chosen.basis
    )
    api.plan(file, memory="8GiB")
    assert worker.asked == ["anchor"] * 2, "that one was quiet"


def test_waiting_for_data_is_part_of_a_step_and_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker((0.5, 0.0))
    worker.waiting = 2.0
    monkeypatch.setattr(job_planning, "run_worker", worker)
    found = api.plan(file, memory="8GiB")
    assert found.plain.predicted["step_seconds"] == pytest.approx(2.5)
    assert "2 s of every step is waiting for its batch" in found.chosen.basis
    (file.parent / "other.py").write_text(JOB)
    worker.waiting = 0.0  # the same steps, whose data come at once
    assert api.plan(file.parent / "other.py", memory="8GiB").plain.predicted["step_seconds"] == pytest.approx(0.5)


def test_two_jobs_that_differ_in_a_learning_rate_get_the_same_plan_and_seconds(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker((0.5, 0.0), (0.7, 0.0), (0.9, 0.0))
    monkeypatch.setattr(job_planning, "run_worker", worker)
    first, again = api.plan(file, memory="8GiB", lr=0.1), api.plan(file, memory="8GiB", lr=0.01)
    assert first.chosen.techniques == again.chosen.techniques and first.chosen.predicted == again.chosen.predicted
    assert again.measured_at and worker.asked == ["anchor"] * 2, "its process is its own, and measured"
    steered = api.plan(file, memory="8GiB", share=0.5)
    assert steered.plain.predicted["step_seconds"] == pytest.approx(0.9), (
        "a number that changes the step, as its rehearsal shows, changes its seconds"
    )
    assert api.plan(file, memory="8GiB", lr=0.2, fresh_plan=True).plain.predicted["step_seconds"] == pytest.approx(0.9)


@pytest.mark.parametrize("fused", [0.01, 0.5])
def test_plain_training_is_taken_at_once_where_it_fits_with_room(
    fused: float, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process times one plain step, and nothing that it finds decides: not even an update ten times as fast."""

    class Slow(Worker):
        def __call__(self, task: Any, environment: Mapping[str, str]) -> Any:
            found = super().__call__(task, environment)
            if isinstance(found, AnchorResult):
                times = {**found.steps[""].times, "update (update)": 2.0, "step": 2.9}
                found = AnchorResult({"": replace(found.steps[""], times=times, probes={"fused": fused})})
            return found

    worker = Slow((1.0, 0.0))
    monkeypatch.setattr(job_planning, "run_worker", worker)
    idle = api.plan(file, memory="8GiB")
    assert idle.chosen.techniques == () and idle.tried == 1 and "of the budget idle" in idle.chosen.basis
    assert idle.chosen.predicted["process_bytes"] <= ROOM * (idle.budget.memory or 0)
    (task,) = worker.tasks
    assert task.alone and not task.pieces and not task.memory
    tight = api.plan(file, memory="400MiB")
    assert tight.tried > 100 and "idle" not in tight.chosen.basis, (
        "what saves memory is looked at where it may be needed"
    )
    assert not any(one.alone for one in worker.tasks[2:]), "and what other techniques need is measured then"


def test_a_plain_step_that_is_measured_alone_is_run_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: no parts of its batch, no operations of techniques, no second try."""
    made, run = example("chain"), []  # type: ignore[var-annotated]

    def busy(run_: Any, feeds: Any, count: int, most: int = 0, alone: bool = True) -> list[StepTimes]:
        run.append((len(feeds), count, most))
        return [StepTimes({"step": 0.5, "update (update)": 0.1}, 0.0, 0.9)] * len(feeds)

    monkeypatch.setattr(anchor_file, "step_times", busy)
    found = measure_anchor(made, (), made.model(), memory=False, alone=True)
    assert run == [(1, 1, 0), (1, 3, 0)] and not found.get("paces") and not found.get("probes")


def room(busy: float) -> TrainingRoom:
    measured = replace(anchor(random.Random(0)), busy=busy)
    ledger = ledger_of(measured)
    predictor = Predictor(Rehearsals(logs()[0], MACHINE), Evidence(ledger, logs()[1], {"": measured}))
    return TrainingRoom(
        predictor, (Accumulate, Checkpoint, FusedOptimizer), predictor.sketch(requested_candidate((), ledger))
    )


def test_a_plan_is_no_faster_than_plain_by_less_than_the_steps_were_held_up() -> None:
    assert room(0.0).noise < 0.1 and room(0.6).noise == 0.6
    for busy in (0.0, 0.9):
        one = room(busy)
        chooser = Chooser(one, one.predictor.evidence.ledger)
        faster = one.plain.predicting(step_seconds=one.plain.predicted["step_seconds"] / 1.5)
        fast = replace(faster, techniques=(FusedOptimizer(),), exactness=Exactness.ROUNDING)
        idle, passed = Budget(memory=100 * one.plain.predicted["process_bytes"]), []  # type: ignore[var-annotated]
        assert (chooser.smaller(fast, passed, idle, [one.plain]) == one.plain) == (busy > 0) == bool(passed)


def test_in_an_idle_budget_plain_wins_ties_and_in_a_tight_one_the_smaller_does() -> None:
    ledger = ledger_of(anchor(random.Random(2)))
    plain = requested_candidate((), ledger)

    def as_fast(*techniques: Any, process: float) -> Any:
        return replace(plain, techniques=techniques, known={**plain.known, "process_bytes": process})

    most = plain.known["process_bytes"]
    small = as_fast(Checkpoint(every=2), process=0.4 * most)
    smaller = as_fast(Checkpoint(every=1), FusedOptimizer(), process=0.2 * most)
    idle, tight = Budget(memory=int(most / ROOM) + 1), Budget(memory=int(1.1 * most))
    assert best_first([smaller, small, plain], idle, "step_seconds", idle=ROOM)[0] == plain
    assert best_first([smaller, small, plain], tight, "step_seconds", idle=ROOM)[0] in (small, smaller)
    assert best_first([plain, small], idle, "step_seconds", small, idle=ROOM)[0] == plain, "though it was chosen before"
    assert best_first([plain, small], tight, "step_seconds", plain, idle=ROOM)[0] == plain


def test_no_technique_of_a_roomy_choice_could_be_left_out() -> None:
    """Whatever the machine is like: of every chosen plan, leaving out a technique is slower, less exact, or the same plan."""
    for seed in range(5):
        ledger = ledger_of(anchor(random.Random(seed)))
        found = list(combinations(ledger, (Accumulate, Checkpoint, FusedOptimizer), Exactness.ROUNDING))
        budget = Budget(memory=10 * max(int(one.known["process_bytes"]) for one in found))
        first = best_first(found, budget, "step_seconds", idle=ROOM)[0]
        for one in found:
            if set(one.techniques) < set(first.techniques):
                assert one.known["step_seconds"] > first.known["step_seconds"] * 1.02


class Mapped(nn.Module):
    """Calls its blocks for each sample by itself, where tensors of no memory of their own pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.func.vmap(block)(x)
        return x


def test_a_model_whose_blocks_fail_when_computed_again_is_planned_without_that() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    made = Job(
        model=Mapped,
        data=lambda: [x] * 3,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=3,
    )
    assert "calls its blocks in a transform of torch.func" in why_not_again(made, Mapped())
    ledger = Planner(made, Hardware()).ledger()
    assert "transform of torch.func" in Checkpoint(every=1).refusal(ledger)
    assert not StepInBackward().refusal(ledger) and verify(made, (StepInBackward(),)).same_bits
