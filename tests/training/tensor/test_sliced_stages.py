"""Slices of a sequence as pieces of a pipeline between real processes: gradients of one process, and the bytes that were predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.costs.ledger import Block, Ledger
from shoestring.core.costs.ledger_parts import Workers
from shoestring.core.errors import Mistake
from shoestring.core.workers.actions import Kind
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.cost import pipe_of
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.pipeline.schedule import in_slices, orders, timeline_of
from shoestring.training.sequence.sequence_pipeline import SequencePipeline
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.tensor_parallel import TensorParallel
from tests.training.data_parallel.test_promises_of_groups import outcomes
from tests.training.tensor.sliced_stages import compared

PLANS: list[tuple[Technique, ...]] = [
    (SequencePipeline(3), Pipeline(2, 1, "gpipe")),
    (SequencePipeline(lengths="9,1,14"), Pipeline(2, 2, "1f1b")),
    (SequencePipeline(3), Pipeline(2, 1, "gpipe"), Checkpoint(every=1)),
]


def keeps_its_promises(place: Path, names: list[str], plans: list[tuple[Technique, ...]]) -> None:
    found = compared(place, names, plans)
    assert len(found) == 2 * len(names) * len(plans)
    for one in found:
        assert one["loss"] < 1e-6 and one["apart"] < 1e-6 and one["weights"], one
        assert one["predicted"] == one["measured"], one
        assert one["sent"][0] == one["sent"][1] and min(one["sent"][0]) > 0, one
    assert {len(one["weights"]) for one in found if one["rank"] == 0} != {
        len(one["weights"]) for one in found if one["rank"] == 1
    }


def test_slices_of_one_sample_go_through_two_stages_with_the_gradients_of_one_process(tmp_path: Path) -> None:
    keeps_its_promises(
        tmp_path, ["one sample"], [(SequencePipeline(lengths="16,11,9,4"), Pipeline(2, schedule="gpipe"))]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama"])
def test_slices_of_every_known_model_go_through_two_stages(name: str, tmp_path: Path) -> None:
    keeps_its_promises(tmp_path, [name], PLANS)


@pytest.mark.slow
def test_slices_go_through_several_chunks_of_every_worker(tmp_path: Path) -> None:
    keeps_its_promises(
        tmp_path,
        ["one sample"],
        [
            (SequencePipeline(5), Pipeline(2, 1, "interleaved", chunks=2)),
            (SequencePipeline(3), Pipeline(2, 1, "naive")),
        ],
    )


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(
    "world, plans",
    [
        (
            2,
            [
                (SequencePipeline(3), DataParallel()),
                (SequencePipeline(2), Accumulate(2), DataParallel()),
                (SequencePipeline(3), Shard(2)),
                (SequencePipeline(2), Checkpoint(every=1), Shard(3)),
                (SequencePipeline(3), TensorParallel(2)),
                (SequencePipeline(3), TensorParallel(2, sequence=True)),
            ],
        ),
        (
            4,
            [
                (SequencePipeline(3), Pipeline(2, 1, "gpipe"), DataParallel()),
                (SequencePipeline(3), TensorParallel(2), Pipeline(2, 1, "gpipe")),
            ],
        ),
    ],
)
def test_slices_go_with_every_other_way_to_divide_the_work(
    world: int, plans: list[tuple[Technique, ...]], tmp_path: Path
) -> None:
    for plan, outcome in zip(plans, outcomes("llama", world, plans, tmp_path), strict=True):
        for one in outcome["workers"]:
            assert one["drift"] < 1e-5 and one["apart"] < 1e-6, (plan, one)
            for known in ("peaks", "sent", "flops"):  # rehearsed and measured
                assert one[known][0] == one[known][1], (plan, known, one)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(["naive", "gpipe", "1f1b", "interleaved"]),
    stages=st.integers(1, 5),
    pieces=st.integers(1, 6),
    chunks=st.integers(1, 3),
    slices=st.integers(1, 5),
)
def test_slices_of_a_piece_go_forward_in_order_and_backward_in_reverse_and_nobody_waits_for_ever(
    schedule: str, stages: int, pieces: int, chunks: int, slices: int
) -> None:
    made = in_slices(orders(schedule, stages, pieces, chunks if schedule == "interleaved" else 1), slices)
    timeline_of(made, lambda action: 1.0)  # raises where somebody waits for ever
    for own in made:
        for chunk in {action.chunk for action in own}:
            for piece in range(pieces):
                mine = [action for action in own if action.chunk == chunk and action.piece // slices == piece]
                assert [(action.kind, action.piece % slices) for action in mine] == [
                    *((Kind.FORWARD, number) for number in range(slices)),
                    *((Kind.BACKWARD, number) for number in reversed(range(slices))),
                ]


@pytest.mark.parametrize("slices, stages", [(1, 2), (4, 2), (8, 4)])
def test_the_predicted_step_is_that_of_the_paper(slices: int, stages: int) -> None:
    """n equal slices through S equal stages: n turns for the last one, and S - 1 until it begins or after it."""
    blocks = tuple(
        Block(f"layers.{number}", forward=1.0, backward=2.0, output=8.0, gradient=8.0) for number in range(8)
    )
    plain = Ledger(blocks, blocks, workers=Workers(stages, samples=1, own=1))
    cost = SequencePipeline(slices).cost(plain)
    pipe = pipe_of(cost, stages, 1, "gpipe")
    each = sum(block.forward + block.backward for block in cost.blocks) / stages / slices
    assert pipe.step == pytest.approx((slices + stages - 1) * each)
    assert pipe.bubble == pytest.approx((stages - 1) / (slices + stages - 1))
    assert len(pipe.staging(pipe.largest()).timeline[0]) == 2 * slices


def test_schedules_that_slices_can_not_follow_are_refused() -> None:
    for schedule in ("zero-bubble", "pipedream"):
        assert "use schedule='gpipe'" in conflict((SequencePipeline(2), Pipeline(2, schedule=schedule)))
    assert not conflict((SequencePipeline(2), Pipeline(2, schedule="1f1b")))
    with pytest.raises(Mistake, match="two halves"):
        in_slices(orders("zero-bubble", 2, 2), 2)
