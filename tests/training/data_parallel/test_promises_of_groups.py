"""The three promises, for every technique that unites workers, alone and with every technique that it allows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Workers
from shoestring.core.exactness import Exactness
from shoestring.core.technique import drift, in_order, technique_json
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.conflicts import conflict
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.memory.allocator import Allocator
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.ledgers import of_world, with_traits
from tests.models import job
from tests.training.members import Group
from tests.training.pipeline.trying import sgd
from tests.waiting import HUNG
from tests.warm import python

pytestmark = pytest.mark.usefixtures("warm_workers")

UNEVEN = Path(__file__).with_name("uneven.py")
TOLERANCE = 1e-4  # of sums in another order, after five steps of SGD


@cache
def ledger(name: str) -> Ledger:
    found = Planner(job(name, optimizer=sgd), Hardware(dtypes={"bf16": ""}), inexact=True, devices=2).ledger()
    return with_traits(found, "own process")


def plans(name: str) -> list[tuple[Technique, ...]]:
    """Every setting of what unites workers, and the first of every other technique with it (the last too of Checkpoint)."""
    uniting: list[Technique] = []
    others: list[Technique] = []
    for kind in CATALOGUE:
        if kind in (Asynchronous, DropStragglers):  # what they do depends on time: test_asynchronous
            continue
        if issubclass(kind, GroupTechnique) and kind.unites != "data":  # test_tensor, test_tensor_processes
            continue
        usable = [one for one in kind.choices(ledger(name)) if not one.refusal(ledger(name))]
        if issubclass(kind, GroupTechnique) and usable:
            uniting += usable
        elif usable and kind is not Allocator:
            others += dict.fromkeys([usable[0], *(usable[-1:] if kind is Checkpoint else ())])
    uniting[-1:-1] = map(CompressGradients, ("bf16", "topk", "powersgd"))  # not the planner's to choose
    pairs = [in_order((one, other)) for one in uniting for other in others if not conflict((one, other))]
    return [(one,) for one in uniting] + pairs


def some(plans: list[tuple[Technique, ...]]) -> list[tuple[Technique, ...]]:
    """What is tried in make test; make check tries all."""
    return [plan for plan in plans if len(plan) == 1 or DataParallel() in plan or Shard(3) in plan]


def outcomes(
    name: str,
    world: int,
    wanted: list[tuple[Technique, ...]],
    folder: Path,
    far: bool = False,
    seeds: bool = False,
    more: Sequence[str] = (),
) -> list[dict[str, Any]]:
    text = json.dumps([[technique_json(technique) for technique in plan] for plan in wanted])
    words = [str(world), str(folder / "store"), name, *["far"] * far, *["seeds"] * seeds, *more]
    workers = [
        subprocess.Popen(
            [python(), "-m", "tests.training.pipeline.trying", str(rank), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for worker in workers:
            assert worker.stdin is not None, "the pipe was asked for"
            worker.stdin.write(text)
            worker.stdin.close()
        assert workers[0].stdout is not None, "the pipe was asked for"
        lines = list(workers[0].stdout)
        assert [worker.wait(HUNG) for worker in workers] == [0] * world
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "world", "whole"),
    [
        ("chain", 2, False),
        pytest.param("frozen bottom", 2, False, marks=pytest.mark.slow),
        *(pytest.param(name, 3, True, marks=pytest.mark.slow) for name in ("chain", "u-net", "gpt2")),
    ],
)
def test_every_way_to_unite_workers_keeps_to_what_it_states_with_every_technique_that_it_allows(
    name: str, world: int, whole: bool, tmp_path: Path
) -> None:
    wanted = plans(name) if whole else some(plans(name))
    if name != "chain":  # what is changed is held to its drift where nothing draws
        wanted = [plan for plan in wanted if all(one.exact for one in plan)]
    found = outcomes(name, world, wanted, tmp_path)
    assert len(found) == len(wanted) and any(len(plan) > 1 for plan in wanted)
    for plan, outcome in zip(wanted, found, strict=True):
        level = max(technique.exactness(ledger(name)) for technique in plan)
        workers = outcome["workers"]
        mixed = any(type(one).__name__ == "Precision" for one in plan)
        for one in workers:
            predicted, measured = one["peaks"]
            assert abs(predicted - measured) <= 0.001 * mixed * measured, (plan, one["peaks"])
            assert one["sent"][0] == one["sent"][1] and one["sent"][0] == workers[0]["sent"][0], plan
            assert one["flops"][0] == one["flops"][1], plan
        if level <= Exactness.ROUNDING:
            assert max(one["apart"] for one in workers) <= TOLERANCE, plan
        elif level is Exactness.CHANGED:
            stated = sum(drift(technique, of_world(ledger(name), world)) for technique in plan)
            assert all(0 < one["drift"] <= stated < 10 for one in workers), plan  # codecs' own errors: test_codecs
            assert all(one["losses"][-1] < one["losses"][0] for one in workers), plan
        if all(one.exact for one in plan):  # all workers have the same weights and tell the same losses
            assert len({one["sum"] for one in workers}) == 1 and len({tuple(one["losses"]) for one in workers}) == 1, (
                plan
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "wanted"),
    [
        (
            2,
            [
                (Pipeline(2, 1),),
                (Pipeline(2, 2),),
                (Pipeline(2, 2, "interleaved", chunks=2),),
                (Pipeline(2, 1, "zero-bubble"),),
            ],
        ),
        (4, [(Pipeline(2), DataParallel()), (Pipeline(2, 2), DataParallel()), (Pipeline(2), Shard(1))]),
    ],
)
def test_norms_that_several_stages_call_are_the_same_on_every_worker(
    world: int, wanted: list[tuple[Technique, ...]], tmp_path: Path
) -> None:
    for plan, outcome in zip(wanted, outcomes("shared u-net", world, wanted, tmp_path), strict=True):
        workers = outcome["workers"]
        for one in workers:
            for known in ("peaks", "sent", "flops"):
                assert one[known][0] == one[known][1], (plan, known, one)
            if plan == (Pipeline(2, 1),):  # pieces and copies have norms of their own samples
                assert one["apart"] <= TOLERANCE, plan
        assert len({one["sum"] for one in workers}) == 1, plan


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_group_with_dropout_draws_other_numbers_of_the_same_distribution(world: int, tmp_path: Path) -> None:
    """The mean over seeds of the finished model's loss is that of plain training, within three standard errors."""
    wanted: list[tuple[Technique, ...]] = [(DataParallel(),), (Shard(3),)]
    assert all(one.exactness(ledger("dropout chain")) is Exactness.DISTRIBUTION for (one,) in wanted)
    for plan, outcome in zip(wanted, outcomes("dropout chain", world, wanted, tmp_path, seeds=True), strict=True):
        plain, group = (torch.tensor(outcome[key], dtype=torch.float64) for key in ("plain", "group"))
        error = float((plain.var() / len(plain) + group.var() / len(group)).sqrt())
        assert 0 < float((plain.mean() - group.mean()).abs()) <= 3 * error < float(plain.mean()) / 10, plan


@pytest.mark.parametrize("technique", [Asynchronous("server"), Asynchronous("hogwild"), DropStragglers()], ids=str)
def test_those_who_do_not_wait_drift_no_further_than_they_state(technique: Technique, tmp_path: Path) -> None:
    flags, now = {"sizes": ",".join(["12"] * 10)}, Ledger((), workers=Workers(3))
    for place, world, plan, steps in (("begun", 1, [], 0), ("plain", 1, [], 10), ("group", 3, [technique], 10)):
        (tmp_path / place).mkdir()
        more = {"rate": 0.0} if not steps else {}
        Group(
            tmp_path / place,
            world,
            UNEVEN,
            plan,
            max(steps, 1),
            flags=flags | more,
            weights=str(tmp_path / place / "weights"),
        ).results()
    begun, plain, group = (
        torch.cat([value.reshape(-1) for _, value in sorted(TensorFile(tmp_path / place / "weights").items())])
        for place in ("begun", "plain", "group")
    )
    assert 0 < float((group - plain).norm() / (plain - begun).norm()) <= drift(technique, now)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_bytes_that_are_counted_are_those_that_the_kernel_counts(world: int, tmp_path: Path) -> None:
    """But for what gloo writes around every message, and for the barriers of the test."""
    wanted: list[tuple[Technique, ...]] = [(DataParallel(),), (Shard(2),), (Shard(3),), (CompressGradients("int8"),)]
    for plan, outcome in zip(wanted, outcomes("chain", world, wanted, tmp_path, far=True), strict=True):
        for one in outcome["workers"]:
            assert 0 <= one["wire"] - sum(one["sent"][1]) <= 0.02 * sum(one["sent"][1]) + 16384, plan


def test_the_stages_of_sharding_need_less_and_less_memory(tmp_path: Path) -> None:
    found = outcomes("llama", 2, [(Shard(1),), (Shard(2),), (Shard(3),)], tmp_path)
    first, second, third = (one["workers"][1]["peaks"][1] for one in found)
    assert third < second <= first
