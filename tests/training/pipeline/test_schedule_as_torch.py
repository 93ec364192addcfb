"""Our orders beside those of torch.distributed.pipelining, whose schedules can be played without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from shoestring.core.workers.actions import Action, Kind
from shoestring.training.pipeline.schedule import Orders, orders

KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUTS, "W": Kind.WEIGHTS}
PLAYED = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
WRITTEN = {"interleaved": theirs.ScheduleInterleaved1F1B, "zero-bubble": theirs.ScheduleInterleavedZeroBubble}


def played(kind: Any, rank: int, stages: int, pieces: int) -> tuple[Action, ...]:
    """What torch has a stage compute. (It also has a table of 1F1B for pictures, which begins with piece 1 on the last worker.)"""
    done: list[Action] = []

    class Played(kind):  # type: ignore[misc]
        _check_inputs = lambda self, *_: ([()] * pieces, [{}] * pieces)  # noqa: E731
        _initialize_stage = _maybe_compute_loss = _maybe_get_loss = _update_losses = lambda self, *_: None

    made = Played.__new__(Played)  # without __init__, which wants a stage that belongs to a process group
    made._num_stages, made._n_microbatches, made.scale_grads = stages, pieces, False
    made._stage = SimpleNamespace(
        stage_index=rank,
        perform_reduce_grad=lambda _: None,
        forward_one_chunk=lambda piece, *_, **__: done.append(Action(Kind.FORWARD, piece, rank)),
        backward_one_chunk=lambda piece, **_: done.append(Action(Kind.BACKWARD, piece, rank)),
        **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), lambda _: []),
    )
    made._step_microbatches()
    return tuple(done)


def written(kind: Any, rank: int, stages: int, pieces: int, chunks: int) -> tuple[Action, ...]:
    """What torch writes down for a worker to compute."""
    made = kind.__new__(kind)
    made._num_stages, made._n_microbatches, made.pp_group_size, made.n_local_stages = stages, pieces, stages, chunks
    made.microbatches_per_round = pieces // max(1, pieces // stages)  # as their __init__ has it
    return tuple(
        Action(KINDS[one.computation_type.value], one.microbatch_index, one.stage_index)
        for one in made._calculate_single_rank_operations(rank)
        if one is not None
    )


def of_torch(schedule: str, stages: int, pieces: int, chunks: int) -> Orders:
    if schedule in PLAYED:
        return tuple(played(PLAYED[schedule], rank, stages, pieces) for rank in range(stages))
    return tuple(written(WRITTEN[schedule], rank, stages, pieces, chunks) for rank in range(stages))


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_our_orders_are_those_of_torch(schedule: str, chunks: int) -> None:
    compared = [
        (stages, pieces)
        for stages in range(1, 7)
        for pieces in range(1, 13)
        if schedule in PLAYED or pieces % max(1, pieces // stages) == 0
    ]  # torch refuses to make rounds of unequal length
    assert len(compared) > 40
    for stages, pieces in compared:
        assert orders(schedule, stages, pieces, chunks) == of_torch(schedule, stages, pieces, chunks), (stages, pieces)
