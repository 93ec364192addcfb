"""Pipeline on real processes: the weights of one process, and memory, bytes and operations of every worker as they were predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.pipeline.schedule import all_end, buffer_needed, orders
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.models import MODELS, job
from tests.training.data_parallel.test_promises_of_groups import TOLERANCE, outcomes
from tests.training.pipeline.cutting import looked_at

slow = pytest.mark.slow
Plan = tuple[Technique, ...]
EXACT = ("naive", "gpipe", "1f1b", "zero-bubble")
TWO: list[Plan] = [
    *((Pipeline(2, 4, schedule),) for schedule in EXACT),
    (Pipeline(2, 4, "interleaved", chunks=2),),
    (Pipeline(2, 3, balance=(1, 5)),),
    (Pipeline(2, 4), Checkpoint(every=1)),
    (Pipeline(2, 4), Accumulate(2)),
    (Pipeline(2, 4), Precision("bf16")),
    (Pipeline(2, 4), FusedOptimizer()),
]
THREE: list[Plan] = [(Pipeline(3, 6, schedule, balance=(1, 4, 1)),) for schedule in EXACT] + [
    (Pipeline(3, 6, "interleaved", chunks=2),),
    (Pipeline(3, 7, "zero-bubble"), Checkpoint(every=1)),
]
FOUR: list[Plan] = [
    (Pipeline(2, 4), DataParallel()),
    (Pipeline(2, 4, "zero-bubble"), Shard(1)),
    (Pipeline(2, 4), CompressGradients("int8")),
    (Pipeline(4, 4),),
]


def check(
    name: str, world: int, wanted: list[Plan], folder: Path, tolerance: float = TOLERANCE, more: Sequence[str] = ()
) -> None:
    for plan, outcome in zip(wanted, outcomes(name, world, wanted, folder, more=more), strict=True):
        mixed = any(isinstance(one, Precision) for one in plan)
        changed = any(isinstance(one, CompressGradients) for one in plan)
        for one in outcome["workers"]:
            predicted, measured = one["peaks"]
            assert abs(predicted - measured) <= 0.001 * mixed * measured, (plan, one["peaks"])
            assert one["sent"][0] == one["sent"][1], plan
            assert one["flops"][0] == one["flops"][1], plan
            assert one["apart"] <= (2e-2 if mixed or changed else tolerance), (plan, one["apart"])
        assert (
            len({one["sum"] for one in outcome["workers"]}) == 1
            and len({tuple(one["losses"]) for one in outcome["workers"]}) == 1
        ), plan


@pytest.mark.parametrize(
    ("name", "world", "wanted"),
    [
        ("chain", 2, TWO),
        pytest.param("chain", 3, THREE, marks=slow),
        ("chain", 4, FOUR),
        pytest.param("llama", 4, [(Pipeline(2, 2), TensorParallel(2))], marks=slow),
    ],
)
def test_a_pipeline_is_one_process_and_costs_what_was_predicted(
    name: str, world: int, wanted: list[Plan], tmp_path: Path
) -> None:
    check(name, world, wanted, tmp_path)


def test_gradients_are_clipped_by_the_norm_of_all_stages(tmp_path: Path) -> None:
    check("chain", 2, [(Pipeline(2, 4),), (Pipeline(2, 4, "zero-bubble"), Accumulate(2))], tmp_path, more=["clip"])


@pytest.mark.parametrize("across", [Pipeline(2, 4), TensorParallel(2)], ids=str)
def test_what_only_the_first_worker_saves_or_holds_is_refused_where_workers_hold_different_weights(
    across: Technique,
) -> None:
    for one in (LocalSteps(8), CompressGradients("topk"), CompressGradients("powersgd")):
        assert "saved by the first worker alone" in conflict((across, one)), one
    for one in (Asynchronous(), Asynchronous("hogwild"), DropStragglers()):
        assert "keeps whole weights" in conflict((across, one)), one
    for one in map(CompressGradients, ("fp16", "bf16", "int8")):
        assert not conflict((across, one)), one


# No statistics of a batch, of which pieces are other than the whole
EVEN = [
    name
    for name in MODELS
    if name in ("llama", "gemma", "t5", "bert", "vit", "swin", "convnext", "frozen bottom", "mamba", "rwkv")
]


@slow
@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_models_of_many_kinds_are_trained_in_stages(name: str, stages: int, tmp_path: Path) -> None:
    """Without dropout, of which workers draw their own."""
    if (calls := len(looked_at(job(name)).calls)) < stages:
        pytest.skip(f"it has {calls} blocks")
    wanted: list[Plan] = [
        (Pipeline(stages, 4, schedule),) for schedule in (EXACT if stages == 2 else ("1f1b", "zero-bubble"))
    ]
    check(name, stages, wanted, tmp_path, 5e-4, ["still"])


@pytest.mark.parametrize(
    ("name", "world", "wanted"),
    [
        ("resnet", 2, [(Pipeline(2, 4, "zero-bubble"),)]),
        ("frozen bottom", 2, [(Pipeline(2, 4, schedule),) for schedule in EXACT]),
        *(
            pytest.param(name, 3, [(Pipeline(3, pieces, "zero-bubble"),) for pieces in (2, 4)], marks=slow)
            for name in ("resnet", "u-net")
        ),
    ],
)
def test_every_stage_has_the_peak_that_was_predicted(name: str, world: int, wanted: list[Plan], tmp_path: Path) -> None:
    """Batch norm whose input waits for no gradient; a first stage whose peak is in its first forward."""
    for plan, outcome in zip(wanted, outcomes(name, world, wanted, tmp_path, more=["still"]), strict=True):
        for one in outcome["workers"]:
            assert one["peaks"][0] == one["peaks"][1], plan


# Whoever sends over a cut goes on when what it sent over it before was taken: nobody waits for ever


@pytest.mark.parametrize("schedule", [*EXACT, "interleaved", "pipedream"])
def test_nobody_waits_for_ever_who_waits_for_what_was_sent_before(schedule: str) -> None:
    for stages in range(1, 9):
        for pieces in range(1, 13):
            for chunks in (1, 2, 3) if schedule == "interleaved" else (1,):
                made = orders(schedule, stages, pieces, chunks)
                assert all_end(made, buffer_needed(made)), (stages, pieces, chunks)
                assert buffer_needed(made) == 1 or schedule == "interleaved"


def test_orders_in_which_somebody_waits_for_ever_are_found() -> None:
    first, second = orders("1f1b", 2, 2)
    assert not all_end((first[::-1], second), 5)
    assert not all_end(orders("interleaved", 2, 5, 2), 1) and buffer_needed(orders("interleaved", 2, 5, 2)) == 2
