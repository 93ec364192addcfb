"""Every technique of the catalogue, trained by the command itself: with a save, a kill, a resume and an export.

The command and its workers are forked from a warm Python (tests/warm.py). The
data wait, once, until the run was killed; so it is always killed between the same two steps. A plan that was saved is replayed: planning
is tested elsewhere, and would take most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.core.exactness import Exactness
from shoestring.core.technique import in_order, text
from shoestring.runs.checkpoints.digest import weights_sha256
from shoestring.runs.folder import Folder, holder
from shoestring.runs.reports.export import checkpoint_of, low_rank
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import KINDS, CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.group_technique import GroupTechnique, uniting
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.adapters.adapters import trained_state
from shoestring.training.memory.adapters.low_rank import LowRank
from shoestring.training.memory.allocator import Allocator, available_kinds
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.planning.plan import training_plan
from shoestring.training.sequence.sequence_pipeline import SequencePipeline
from shoestring.training.sparse.l0 import L0
from shoestring.training.sparse.magnitude_prune import MagnitudePrune
from shoestring.training.sparse.random_prune import RandomPrune
from shoestring.training.sparse.variational_dropout import VariationalDropout
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.records import records
from tests.waiting import HUNG, PASS_GATE, Gates, until
from tests.warm import python

pytestmark = pytest.mark.usefixtures("warm_workers")

STEPS, EVERY = 6, 2
JOB = (
    PASS_GATE
    + """
import torch
from torch import nn
from shoestring import Job

def data():
    number = 0
    while True:
        pass_gate(".", number)   # before the fifth batch, until the test has killed it
        x = torch.randn(24, 64)
        number += 1
        yield x, x[:, :10].argmax(1)

def job(steps: int = 6) -> Job:
    block = lambda: nn.Sequential(nn.Linear(64, 260), nn.GELU(), nn.Dropout(0.2), nn.Linear(260, 64))
    return Job(model=lambda: nn.Sequential(block(), block(), block(), nn.Linear(64, 10)), data=data, steps=steps,
               optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3))
"""
)
SEQUENCES = (
    JOB[: JOB.index("        x = ")]
    + """
        x = torch.randint(256, (4, 25))
        number += 1
        yield x[:, :-1], x[:, 1:]

def job(steps: int = 6) -> Job:
    return Job(model=lambda: Gpt(32, 2, 2, 24), data=data, steps=steps, weight=lambda batch: batch[1].numel(),
               loss=lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()))

from shoestring.jobs.gpt import Gpt
"""
)
QUICK: list[Technique] = [CompressGradients("powersgd")]
ALL: list[Technique] = [
    SequencePipeline(3),
    TensorParallel(2),
    Pipeline(2, 2),
    Pipeline(2, 2, "zero-bubble"),
    Pipeline(2, 2, "pipedream", flush=2),
    LowRank(rank=4, also="3"),
    Precision("bf16"),
    Precision("fp16"),
    Precision("bf16", "bf16"),
    Accumulate(2),
    OffloadActivations(),
    Checkpoint(every=1),
    Checkpoint(schedule="((0,),1,2)"),
    FusedOptimizer(),
    OffloadOptimizer(),
    *([OffloadOptimizer("host")] if torch.cuda.is_available() else []),  # else the moments are in host memory already
    OffloadOptimizer(moments="8bit"),
    OffloadModel(),
    OffloadModel(moments="8bit"),
    StepInBackward(),
    DataParallel(),
    DataParallel(linear=True, warmup=3),
    Shard(1),
    Shard(2),
    Shard(3),
    *map(CompressGradients, KINDS),
    LocalSteps(h=2),
    LocalSteps(h=2, after=1),
    LocalSteps(h=2, outer=0.7),
    Asynchronous("server"),
    Asynchronous("hogwild"),
    DropStragglers(),
    EMA(0.5),
    MagnitudePrune(every=1),
    RandomPrune(every=1),
    L0(every=1),
    VariationalDropout(every=1),
    *map(Allocator, available_kinds()),
]
BY_TIME = (Asynchronous, DropStragglers)  # who comes first depends on time, so two runs differ
# What every worker keeps for itself must survive where workers hold different weights, too
PAIRS: list[tuple[Technique, ...]] = [
    in_order((across, one))
    for across in (Pipeline(2, 2), TensorParallel(2))
    for one in ALL
    if not conflict((across, one))
    and not isinstance(one, SequencePipeline)
    and not (isinstance(one, Checkpoint) and one.schedule)  # which is of the blocks of another job
    and (not isinstance(one, GroupTechnique) or one.unites == "data")
]


def test_the_matrix_has_every_technique_of_the_catalogue() -> None:
    assert {type(one) for one in ALL} == set(CATALOGUE) and set(QUICK) <= set(ALL)


@pytest.mark.parametrize(
    "technique", [pytest.param(one, id=text(one), marks=[] if one in QUICK else [pytest.mark.slow]) for one in ALL]
)
def test_a_technique_is_trained_by_the_command_killed_resumed_and_exported(
    technique: Technique, tmp_path: Path
) -> None:
    survives((technique,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PAIRS, ids=lambda plan: " + ".join(map(text, plan)))
def test_workers_that_hold_different_weights_survive_with_every_technique(
    plan: tuple[Technique, ...], tmp_path: Path
) -> None:
    survives(plan, tmp_path)


def survives(plan: tuple[Technique, ...], tmp_path: Path) -> None:
    """It is trained, killed, resumed and exported, and ends with the bits of an undisturbed run."""
    technique = plan[-1]
    ahead = technique == Asynchronous("hogwild")  # asks for its next part before it counts the last step as done
    source = SEQUENCES if any(isinstance(one, (SequencePipeline, TensorParallel)) for one in plan) else JOB
    (tmp_path / "job.py").write_text(source)
    training_plan(plan, Exactness.CHANGED).save(tmp_path / "plan.json")
    axes = {one.unites for one in uniting(plan)}
    count = 3 if isinstance(technique, DropStragglers) else 2 ** len(axes)
    devices = ["--devices", str(count)] if axes else []
    words = ["train", "job.py", "--plan", "plan.json", "--save-every", str(EVERY), "--json", *devices]

    last = 3 if technique == LocalSteps(h=2, after=1) else 4  # its workers meet after the steps 1, 3, 5 and 6
    with Gates(tmp_path, 4 + ahead):
        begun = Command(tmp_path, *words, "--run", "run")
        saved = begun.until(
            lambda: any(event["event"] == "saved" and event["step"] == last for event in records(tmp_path / "run"))
        )
        assert saved, begun.said()
        begun.kill(tmp_path / "run")

    report = Command(tmp_path, *words, "--run", "run").report()
    assert [event["step"] for event in records(tmp_path / "run") if event["event"] == "begun"] == [0, last]
    assert report["steps"] == len(report["losses"]) == STEPS
    assert all(torch.tensor(report["losses"]).isfinite())
    weights = exported(tmp_path, "run", "--trained")
    assert all(one.isfinite().all() for one in weights.values())
    if isinstance(technique, LowRank):  # exported with their updates
        checkpoint = checkpoint_of(Folder(tmp_path / "run"), None)
        weights = trained_state(checkpoint.all_weights(), low_rank(checkpoint) or {})
    assert weights_sha256(weights) == report["weights_sha256"], "what is exported is what was trained"
    if not isinstance(technique, BY_TIME):
        undisturbed = Command(tmp_path, *words, "--run", "other").report()
        assert report["losses"] == undisturbed["losses"] and report["weights_sha256"] == undisturbed["weights_sha256"]
    if isinstance(technique, EMA):
        first, second = (weights_sha256(exported(tmp_path, run, "--out", f"{run}.average")) for run in ("run", "other"))
        assert first == second != report["weights_sha256"]


def exported(place: Path, run: str, *words: str) -> dict[str, torch.Tensor]:
    out = Command(place, "export", run, "--to", "safetensors", "--json", *words).report()["path"]
    return dict(TensorFile(place / out).items())


class Command:
    """A command, in a process of its own."""

    def __init__(self, place: Path, *words: str) -> None:
        self.place = place
        with open(place / "out", "w") as out, open(place / "err", "w") as err:
            self.process = subprocess.Popen([python(), "-m", "shoestring", *words], cwd=place, stdout=out, stderr=err)

    def until(self, done: Callable[[], bool]) -> bool:
        """Wait for something; gives whether it came before the command's end."""
        until(lambda: done() or self.process.poll() is not None, "what the command was to do")
        return done()

    def kill(self, folder: Path) -> None:
        """Kill it and the first worker that trains for it, and wait until nobody does any more."""
        worker = next(event["pid"] for event in records(folder) if event["event"] == "begun")
        self.process.kill()
        self.process.wait()
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        until(lambda: holder(folder) is None, "the end of its workers")

    def report(self) -> dict[str, Any]:
        try:
            assert self.process.wait(HUNG) == 0, self.said()
        finally:
            self.process.kill()
        found: dict[str, Any] = json.loads((self.place / "out").read_text())
        return found

    def said(self) -> str:
        return (self.place / "err").read_text()
