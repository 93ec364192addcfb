"""Frozen weights under OffloadModel are written once, when the run begins, and then only read; validation between two
steps changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running.run import Run
from shoestring.core.running.run_weights import bring_home, traffic
from shoestring.data.feed import Feed
from shoestring.measure.holdings import Holders
from shoestring.measure.timeline import peak
from shoestring.measure.tracker import Tracker, watch_run
from shoestring.training.evidence.rehearse import build_run, rehearse, track, tracked_steps
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload import offload_model as stream
from shoestring.training.memory.offload import offload_optimizer as offload
from shoestring.training.memory.offload import offloaded_optimizer, row_split, streaming
from shoestring.training.memory.offload.disk_store import pages
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.validation import run_validation
from tests.models import SMALL, hugging, job, seeded
from tests.training.memory.offload.test_offload_model import apart, trained


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the smallest models leave memory."""
    for module in (offloaded_optimizer, offload, streaming):
        monkeypatch.setattr(module, "SMALL", 256)


def frozen(which: Callable[[str], bool], clip: float = 0.0) -> Job:
    """Six transformer blocks, with some weights frozen."""

    def made() -> nn.Module:
        model = hugging("LlamaForCausalLM", "LlamaConfig", **{**SMALL, "num_hidden_layers": 6})()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not which(name))
        return model

    return replace(job("llama"), model=made, clip=clip)


def bottom(name: str) -> bool:
    return name.startswith(("model.embed_tokens", *(f"model.layers.{number}." for number in range(4))))


def all_but_queries(name: str) -> bool:
    return name.startswith("model.layers.") and "q_proj" not in name


def streamed(run: Run) -> Any:
    return run.state["stream"]


@pytest.mark.parametrize(
    ("which", "clip", "more"),
    [
        (bottom, 0.0, ()),
        (bottom, 0.05, (Accumulate(2),)),
        (all_but_queries, 0.0, ()),
        (all_but_queries, 0.05, (Accumulate(2),)),
    ],
)
def test_frozen_weights_are_written_once_and_the_others_trained_to_the_same_bits(
    which: Callable[[str], bool], clip: float, more: tuple[Technique, ...]
) -> None:
    made, plan = frozen(which, clip), (FusedOptimizer(), *more, OffloadModel())
    after, run = trained(made, plan)
    regions = streamed(run).store.regions.values()
    still = [region for region in regions if region.lasting and region.version == 1]
    assert len(still) == (5 if which is bottom else 6) and all(region.slots == 1 for region in still)
    assert all(region.version > 1 for region in regions if region not in still)
    assert not any(
        which(region.name.removeprefix("moments of ").removeprefix("waiting gradient of "))
        for region in regions
        if region.name.startswith(("moments", "waiting"))
    )
    assert apart(trained(made, (FusedOptimizer(), *more))[0], after) == 0.0
    predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
    assert peak(predicted).bytes == peak(measured).bytes
    assert predicted.moved == measured.moved and predicted.stored == measured.stored


def test_a_frozen_block_below_all_that_is_trained_moves_its_bytes_once_a_step() -> None:
    """4 bytes a weight instead of 28."""
    moved = []
    for count in (3, 4):
        made = frozen(
            lambda name, count=count: name.startswith(  # type: ignore[misc]
                ("model.embed_tokens", *(f"model.layers.{number}." for number in range(count)))
            )
        )
        moved.append(rehearse(made, (OffloadModel(),)).moved[-1])
    model = seeded(frozen(bottom))
    block = [parameter for name, parameter in model.named_parameters() if name.startswith("model.layers.3.")]
    large = [parameter for parameter in block if parameter.numel() >= 256]
    moments = sum(2 * pages(8 * parameter.numel()) for parameter in large)
    size = pages(sum(4 * parameter.numel() for parameter in block))
    assert moved[0] - moved[1] == 2 * size + moments  # it is not read for a backward, not written, and has no moments


def test_a_block_of_which_few_weights_are_trained_writes_those_alone() -> None:
    made = frozen(all_but_queries)
    run = build_run(made, (OffloadModel(),), seeded(made))
    store = streamed(run).store
    assert store.regions["model.layers.2"].size == pages(4 * 64 * 64) and store.regions["model.layers.2"].slots == 2
    assert store.regions["frozen of model.layers.2"].slots == 1


def between_steps(
    made: Job, plan: tuple[Technique, ...], count: int, validate: bool
) -> tuple[list[int], list[float], dict[str, Tensor]]:
    """Bytes of every step, what validation found after each, and the weights."""
    run = build_run(made, plan, seeded(made))
    moved, found, before = [], [], traffic(run)
    for _ in steps(run, islice(Feed(made), count)):
        moved.append(traffic(run) - before)
        if validate:
            found.append(run_validation(run, made)["loss"])
        before = traffic(run)
    bring_home(run)
    return moved, found, run.model.state_dict()


@pytest.mark.parametrize(("name", "clip", "cut"), [("chain", 0.0, False), ("gpt2", 0.05, True), ("u-net", 0.0, False)])
def test_a_validation_changes_neither_the_bytes_nor_the_bits_of_the_next_step(
    name: str, clip: float, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:
        for module in (offloaded_optimizer, row_split, stream, offload):
            monkeypatch.setattr(module, "CHUNK", 4096)
    made = job(name, clip=clip)
    made = replace(made, held_out=lambda: list(islice(Feed(made), 3)))
    moved, _, after = between_steps(made, (OffloadModel(),), 4, False)
    moved_with, found, after_with = between_steps(made, (OffloadModel(),), 4, True)
    assert moved_with == moved and moved[1:] == [rehearse(made, (OffloadModel(),)).moved[-1]] * 3
    assert apart(after, after_with) == 0.0
    assert found == pytest.approx(between_steps(made, (), 4, True)[1], abs=1e-5) and len(set(found)) == 4


def test_a_validation_does_not_raise_the_peak() -> None:
    made = job("chain")
    made = replace(made, held_out=lambda: list(islice(Feed(made), 2)))
    tracker = Tracker()
    with tracker:
        run = watch_run(build_run(made, (OffloadModel(),), seeded(made)), tracker, Holders(made))
    for _ in tracked_steps(run, islice(Feed(made), 2), tracker):
        with tracker:
            run_validation(run, made)
    assert peak(tracker.log).bytes == peak(rehearse(made, (OffloadModel(),))).bytes


def test_a_validation_that_looks_at_a_weight_which_is_not_there_is_refused() -> None:
    made = replace(job("chain"), validate=lambda model: {"loss": model.head.weight.norm()})
    run = build_run(made, (OffloadModel(),), seeded(made))
    list(steps(run, islice(Feed(made), 1)))
    with pytest.raises(Mistake, match=r"head.weight outside of the module that it belongs to"), torch.no_grad():
        run_validation(run, made)
