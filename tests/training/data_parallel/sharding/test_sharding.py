"""Sharding: who owns which part of a stretch of weights, what is padded, and what is here when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.running.run import Run, plain_run
from shoestring.core.workers.link import CompletedWork, Link, Sending
from shoestring.core.workers.mesh import on_one_axis
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.data_parallel.sharding.shard_units import VECTOR, ShardUnit, cut_up
from shoestring.training.data_parallel.sharding.sharding import Sharding


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.inner(x))
        return found


def run_of(link: Link, **changes: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), Block(), Block(), nn.Linear(5, 2))
    job = Job(
        model=lambda: model,
        data=list,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1.0),
        mesh=on_one_axis(link),
        **changes,
    )
    return plain_run(job, model, {"1": model[1], "2": model[2]})


class Recording(Link):
    """An imagined link that notes which operations are begun, and with how many numbers of its own."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.begun: list[tuple[str, int]] = []

    def begin_scatter(self, whole: Tensor, part: Tensor) -> Sending:
        self.begun.append(("scatter", len(part)))
        part.copy_(whole[self.rank * len(part) :][: len(part)] * self.world)  # as if all had the same gradients
        return CompletedWork()

    def begin_gather(self, part: Tensor, whole: Tensor) -> Sending:
        self.begun.append(("gather", len(part)))
        return super().begin_gather(part, whole)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_parts_of_all_workers_are_the_whole_once(world: int) -> None:
    """Pieces of a weight lie one after the other in the workers' parts; the padding is at the end and zero."""
    sizes = [(7,), (3, 4), (1,)]
    torch.manual_seed(0)
    values = [torch.randn(size) for size in sizes]
    found: list[list[Tensor]] = [[], [], []]
    for rank in range(world):
        weights = [nn.Parameter(value.clone()) for value in values]
        unit = ShardUnit(weights, Link(rank, world), None, parted=False)
        assert unit.size % (world * VECTOR) == 0 and unit.part * world == unit.size >= 20
        assert not unit.whole[20:].any()
        for number, weight in enumerate(weights):
            assert torch.equal(weight, values[number]), "the weights are views of the stretch, with their values"
            if weight in unit.pieces:
                found[number].append(unit.pieces[weight].detach())
    for pieces, value in zip(found, values, strict=True):
        assert torch.equal(torch.cat(pieces), value.reshape(-1))


def test_a_worker_with_nothing_but_padding_has_no_piece() -> None:
    weight = nn.Parameter(torch.ones(VECTOR))
    units = [ShardUnit([nn.Parameter(weight.detach().clone())], Link(rank, 3), None, parted=False) for rank in range(3)]
    assert [len(unit.pieces) for unit in units] == [1, 0, 0]
    assert [unit.part for unit in units] == [VECTOR] * 3


def test_units_come_in_the_order_of_backward() -> None:
    """The blocks from the last to the first, then what is outside of all of them."""
    run = run_of(Link(0, 2))
    found = cut_up(run, 2)
    assert [block for block, _ in found] == [run.blocks["2"], run.blocks["1"], None]
    assert {id(weight) for _, members in found for weight in members} == {
        id(weight) for weight in run.model.parameters()
    }


def test_frozen_weights_are_cut_only_where_weights_are() -> None:
    run = run_of(Link(0, 2))
    run.blocks["1"].requires_grad_(False)
    assert [block for block, _ in cut_up(run, 2)] == [run.blocks["2"], None]
    assert [block for block, _ in cut_up(run, 3)] == [run.blocks["2"], run.blocks["1"], None]


def test_the_optimizer_steps_pieces_only() -> None:
    run = run_of(Link(1, 2))
    before = sum(weight.numel() for weight in run.model.parameters())
    sharding = Sharding(run, run.team.link, 2)
    own = [piece for group in run.optimizer.param_groups for piece in group["params"]]
    assert all(piece.dim() == 1 for piece in own)
    assert sum(piece.numel() for piece in own) == sum(unit.part for unit in sharding.units) - sum(
        unit.size - unit.full for unit in sharding.units
    ), "the last worker has the padding"
    assert 0 < sum(piece.numel() for piece in own) < before


def step(link: Recording, stage: int, batch: Tensor) -> Run:
    run = Shard(stage).apply(run_of(link, loss=lambda output, batch: output.sum()))
    run.gradients(run, batch)
    run.update(run)
    return run


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_scatters_gradients_in_the_order_of_backward_and_gathers_weights(stage: int) -> None:
    link = Recording(0, 2)
    step(link, stage, torch.ones(4, 3))
    block, outside = 32, 32  # 30 numbers of a block and 32 outside of them, in two parts of a multiple of 16
    units = [block // 2, block // 2, outside // 2]
    assert link.begun == [("scatter", part) for part in units] + [("gather", part) for part in units]


def test_stage_three_gathers_a_block_before_it_runs_and_before_its_backward() -> None:
    link = Recording(0, 2)
    run = step(link, 3, torch.ones(4, 3))
    kinds = [kind for kind, _ in link.begun]
    assert kinds == ["gather"] * 3 + ["gather", "scatter", "gather", "scatter", "scatter"], (
        "outside, forward; then each block's backward"
    )
    sharding = run.state["shards"]
    assert isinstance(sharding, Sharding) and not any(unit.present for unit in sharding.units), (
        "between steps a worker has its parts only"
    )
    assert all(unit.whole.untyped_storage().nbytes() == 0 for unit in sharding.units)
    with run.outside.usable():
        assert all(unit.present for unit in sharding.units)
    assert not any(unit.present for unit in sharding.units)


def test_with_one_worker_a_step_is_the_plain_one() -> None:
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    plain = run_of(Link(), loss=lambda output, batch: output.square().mean())
    plain.gradients(plain, batch)
    plain.update(plain)
    for stage in (1, 2, 3):
        run = Shard(stage).apply(run_of(Link(), loss=lambda output, batch: output.square().mean()))
        run.gradients(run, batch)
        run.update(run)
        with run.outside.usable():
            for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
                assert torch.equal(one, other), stage


def test_a_weight_that_nobody_used_is_not_stepped() -> None:
    run = Shard(2).apply(
        replace(
            run_of(Link(0, 1)), forward=lambda model, batch: model[0](batch), loss=lambda output, batch: output.sum()
        )
    )
    before = [weight.detach().clone() for weight in run.model.parameters()]
    run.gradients(run, torch.ones(2, 3))
    run.update(run)
    changed = [not torch.equal(weight, old) for weight, old in zip(run.model.parameters(), before, strict=True)]
    assert changed == [True, True] + [False] * 6
