"""A memory technique that costs more than it saves says so, and is not chosen where plain training fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shoestring
from shoestring.core.budget import Budget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.running.run import Run
from shoestring.core.units import bytes_text
from shoestring.planning.plan import Outcome
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.adapters.low_rank import LowRank
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.plan import load_plan, training_plan
from shoestring.training.planning.planner import Planner
from shoestring.training.planning.savings import excess
from shoestring.training.report.outcome_text import training_outcome_text
from shoestring.training.room import TrainingRoom
from shoestring.training.technique import TrainingTechnique
from tests.ledgers import with_traits


def layers(width: int, depth: int, rows: int) -> Job:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

    return Job(
        model=make,
        data=[(torch.zeros(rows, width),)],
        forward=lambda model, batch: model(batch[0]),
        loss=lambda out, batch: out.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=3,
    )


JOBS: dict[str, Callable[[], Job]] = {
    "tiny": lambda: layers(8, 2, 2),
    "many weights": lambda: layers(192, 8, 2),
    "many activations": lambda: layers(64, 8, 4096),
}
TECHNIQUES = [
    Accumulate(pieces=2),
    Checkpoint(every=1),
    StepInBackward(),
    OffloadModel(),
    OffloadOptimizer(),
    OffloadActivations(),
    LowRank(rank=2),
    FusedOptimizer(),
    EMA(decay=0.9),
]


@cache
def planner(name: str) -> tuple[Planner, Ledger]:
    job = JOBS[name]()
    if name == "many weights":
        job = replace(job, optimizer=torch.optim.AdamW)
    made = Planner(job, Hardware(), inexact=True)
    return made, with_traits(made.ledger(), "own process")


@cache
def outcome(name: str, technique: TrainingTechnique) -> Outcome:
    made, ledger = planner(name)
    return made.outcome_of(ledger, None, (technique,))


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_above_plain_training_is_warned_of_with_both_figures(name: str, technique: TrainingTechnique) -> None:
    made, ledger = planner(name)
    if technique.refusal(ledger):
        pytest.skip("it is refused for this job")
    found = outcome(name, technique)
    above = found.chosen.predicted["peak_bytes"] > found.plain.predicted["peak_bytes"]
    warned = [text for text in found.chosen.warnings if "of tensors" in text]
    assert len(warned) == above
    for text in warned:
        assert (
            bytes_text(found.chosen.predicted["peak_bytes"]) in text
            and bytes_text(found.plain.predicted["peak_bytes"]) in text
            and str(found.chosen) in text
        )
    shown = training_outcome_text(found)
    assert ("warning: " in shown) is bool(found.chosen.warnings) and all(
        text in shown for text in found.chosen.warnings
    )
    assert json.loads(json.dumps(found.as_json()))["chosen"]["warnings"] == list(found.chosen.warnings)
    if technique.saves_memory and above:
        room = TrainingRoom(made.predictor, made.catalogue, found.plain)
        fits, tight = (
            Budget(memory=2 * found.plain.predicted["process_bytes"]),
            Budget(memory=found.plain.predicted["process_bytes"] // 2),
        )
        assert room.needless(found.chosen, fits) and not room.needless(found.chosen, tight)


def test_the_table_has_both_kinds() -> None:
    assert (
        outcome("tiny", OffloadModel()).chosen.warnings and not outcome("many weights", OffloadModel()).chosen.warnings
    )
    assert (
        outcome("many activations", EMA(decay=0.9)).chosen.warnings
        and not outcome("many activations", Checkpoint(1)).chosen.warnings
    )


def test_a_process_within_what_two_trials_differ_is_not_called_larger() -> None:
    plain = training_plan((), peak_bytes=100, process_bytes=1000)
    assert not excess(training_plan((Checkpoint(1),), peak_bytes=90, process_bytes=1030), plain)
    text = excess(training_plan((Checkpoint(1),), peak_bytes=90, process_bytes=1100), plain)
    assert "1.07 KiB of process, where plain training needs 1,000 B" in text and "tensors" not in text
    assert "leave out Checkpoint(every=1)" in text
    assert "leave out" not in excess(training_plan((FusedOptimizer(),), peak_bytes=101, process_bytes=1000), plain), (
        "it was not to save any"
    )


def test_a_warning_is_kept_with_the_plan(tmp_path: Path) -> None:
    found = outcome("tiny", OffloadModel()).chosen
    found.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").warnings == found.warnings != ()


@dataclass(frozen=True)
class Dearer(TrainingTechnique):
    """It is to save memory, makes steps faster, and holds much more than plain training does."""

    order: ClassVar[int] = 5
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    why: ClassVar[str] = "it does not"

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.BITS

    def cost(self, ledger: Ledger) -> Ledger:
        faster = tuple(
            replace(block, forward=block.forward / 4, backward=block.backward / 4) for block in ledger.blocks
        )
        return replace(ledger, blocks=faster, update=replace(ledger.update, seconds=0.0, call_seconds=0.0))

    def apply(self, run: Run) -> Run:
        def forward(model: nn.Module, batch: Any) -> Any:
            held = torch.ones(1 << 20)
            return run.forward(model, batch) + held[0] * 0

        return replace(run, forward=forward)


def test_what_needs_more_than_plain_training_is_not_chosen_where_plain_training_fits() -> None:
    made = Planner(layers(64, 4, 64), Hardware(), catalogue=(Dearer,))
    found = made.outcome(1 << 40)
    assert found.chosen.techniques == ()
    (plan, why), *others = found.runners_up
    assert plan.techniques == (Dearer(),) and "needs more memory than plain training" in why and not others
    assert made.outcome(1 << 40, (Dearer(),)).chosen.warnings


def test_a_script_and_the_page_of_its_run_are_warned(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"EMA\(.*\) needs more memory than plain training"):
        list(shoestring.train(layers(64, 2, 2), (EMA(decay=0.9),), run=tmp_path / "run"))
    told = [
        event["text"]
        for event in map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
        if event["event"] == "warning"
    ]
    assert any("needs more memory than plain training" in text for text in told)
