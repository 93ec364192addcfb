"""Gradients that wait on disk: clipping by global norm and batches in pieces under OffloadModel give the bits that they give without it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload import disk_store, offloaded_optimizer, row_split, streaming
from shoestring.training.memory.offload import offload_model as stream
from shoestring.training.memory.offload import offload_optimizer as offload
from shoestring.training.memory.offload.disk_store import DiskStore
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offloaded_optimizer import BufferRing
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import draw, job, rows, seeded
from tests.training.memory.offload.test_offload_model import apart, trained

CLIP = 0.05
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("dropout chain", "recurrent", "llama", "t5", "vit", "resnet", "mixtral")
]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9
    )  # of which, other than of Adam, the size of a gradient matters


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the smallest models leave memory; no weight is cut."""
    for module in (offloaded_optimizer, offload, streaming):
        monkeypatch.setattr(module, "SMALL", 256)


@pytest.fixture
def tiny(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that weights are cut into chunks and rows."""
    for module in (offloaded_optimizer, row_split, stream, offload):
        monkeypatch.setattr(module, "CHUNK", 4096)


@pytest.mark.parametrize("name", ["chain", "u-net", "gpt2", *SLOW])
def test_clipped_accumulated_and_streamed_in_every_combination_the_weights_are_the_same_bits(
    name: str, small: None
) -> None:
    ends = []
    for clip in (0.0, CLIP):
        for pieces in (1, 3):
            made, others = (
                job(name, clip=clip, optimizer=sgd),
                (FusedOptimizer(), *([Accumulate(pieces)] if pieces > 1 else [])),
            )
            ends.append(trained(made, others)[0])
            assert apart(ends[-1], trained(made, (*others, OffloadModel()))[0]) == 0.0, (clip, pieces)
    assert apart(ends[0], ends[2]) > 0 < apart(ends[1], ends[3]), "clipping changes something"


@pytest.mark.parametrize("techniques", [(OffloadModel(),), (Accumulate(2), OffloadModel())])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),  # looks at whole weights
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # keeps no moments
        lambda parameters: torch.optim.AdamW([{"params": parameters[:5], "lr": 1e-2}, {"params": parameters[5:]}]),
    ],
)
def test_the_users_own_optimizer_steps_by_what_waited(
    optimizer: Any, techniques: tuple[Technique, ...], tiny: None
) -> None:
    made = job("chain", clip=CLIP, optimizer=lambda parameters: optimizer(list(parameters)))
    assert apart(trained(made, techniques[:-1])[0], trained(made, techniques)[0]) == 0.0


@pytest.mark.parametrize(
    "name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("more", [(), (Accumulate(2),)])
def test_the_norm_of_a_weight_that_is_never_whole_is_that_up_to_rounding(
    name: str, more: tuple[Technique, ...], tiny: None
) -> None:
    made = job(name, clip=CLIP, optimizer=sgd)
    after, run = trained(made, (*more, OffloadModel()))
    assert any(len(split.spans) > 1 for split in run.state["stream"].row_splits.values())  # type: ignore[attr-defined]
    assert apart(trained(made, more)[0], after) <= 1e-5


@pytest.mark.parametrize("name", ["chain", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("clip", "more"), [(CLIP, ()), (0.0, (Accumulate(2),)), (CLIP, (Accumulate(2),))])
def test_bytes_in_memory_on_the_way_and_on_the_disk_are_as_predicted(
    name: str, clip: float, more: tuple[Technique, ...], tiny: None
) -> None:
    made, plan = job(name, clip=clip), (*more, OffloadModel())
    predicted, measured = rehearse(made, plan), track(made, plan, seeded(made))
    assert peak(predicted).bytes == peak(measured).bytes
    assert predicted.moved == measured.moved and predicted.stored == measured.stored


def test_a_weight_moves_the_bytes_that_are_stated() -> None:
    """28 bytes with Adam in float32; 12 more if clipped, 16 more for every other piece. But for pages, and for the three blocks that are
    in memory where one pass ends and the next begins."""
    width, depth = 128, 12
    batch = torch.randn(8, width, generator=draw())
    made = Job(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(depth))
        ),
        data=lambda: [batch] * 9,
        loss=lambda output, batch: output.square().mean(),
    )
    weight, weights = width * width, depth * width * width
    for clip, pieces, stated in ((0.0, 1, 28), (CLIP, 1, 40), (0.0, 3, 60), (CLIP, 3, 72)):
        moved = rehearse(
            replace(made, clip=clip), (*([Accumulate(pieces)] if pieces > 1 else []), OffloadModel())
        ).moved[-1]
        spared = stated * weights - moved
        assert 0 <= spared <= 4 * weight * 3 * (2 * pieces + (clip > 0)), (clip, pieces, spared)


def test_weights_of_several_dtypes_are_clipped_to_the_same_bits(small: None) -> None:
    class Layer(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64, dtype=dtype)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x.to(self.inner.weight.dtype)).tanh().to(x.dtype)

    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    made = Job(
        model=lambda: nn.Sequential(*map(Layer, kinds), nn.Linear(64, 10)),
        data=lambda: [rows()] * 9,
        clip=CLIP,
        optimizer=sgd,
    )
    for more in ((), (Accumulate(2),)):
        assert apart(trained(made, more)[0], trained(made, (*more, OffloadModel()))[0]) == 0.0


@pytest.mark.parametrize("clip", [0.0, CLIP])
@pytest.mark.parametrize("first", [True, False], ids=["in the first piece only", "in the last piece only"])
def test_weights_that_take_part_in_one_piece_are_stepped_all_the_same(clip: float, first: bool, tiny: None) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.always(x).tanh() + (self.sometimes(x).tanh() if bool(x[0, 0] > 50) == first else 0.0)

    batch = torch.randn(8, 64, generator=draw())
    batch[:4, 0] += 100.0  # the first piece
    made = Job(
        model=lambda: nn.Sequential(*(Layer() for _ in range(5))),
        data=lambda: [batch] * 9,
        clip=clip,
        loss=lambda output, batch: output[:, 1:].square().mean(),
        optimizer=sgd,
    )
    assert apart(trained(made, (Accumulate(2),))[0], trained(made, (Accumulate(2), OffloadModel()))[0]) == 0.0


def test_no_checkpoint_stands_on_gradients_that_wait(tmp_path: Path, tiny: None) -> None:
    _, run = trained(job("chain", clip=CLIP), (OffloadModel(),), folder=tmp_path)
    store: DiskStore = run.state["stream"].store  # type: ignore[attr-defined]
    waiting = [region for region in store.regions.values() if region.name.startswith("waiting")]
    assert waiting and all(region.written and region.slots == 1 for region in waiting)
    assert not [name for name in store.state_dict() if name.startswith("waiting")]
    store.pin()
    assert all(region.pinned is None for region in waiting)
    assert "the last checkpoint does not stand on that" in store.cure(waiting[0], 0)


def test_a_disk_that_fails_in_the_second_pass_says_so(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job("chain", clip=CLIP)
    run = build_run(made, (OffloadModel(),), seeded(made), folder=tmp_path)
    real = os.pwrite

    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def update(now: Any) -> None:
        monkeypatch.setattr(disk_store.os, "pwrite", full)
        run.update(now)
        run.state["stream"].store.settle()  # type: ignore[attr-defined]

    with pytest.raises(Mistake, match="No space left on device; the last checkpoint is intact"):
        list(steps(replace(run, update=update), [rows()]))
    monkeypatch.setattr(disk_store.os, "pwrite", real)


READ_AHEAD_AND_THEN_FILLED = [
    *((number, True) for number in range(8)),
    (0, False),
    *((number, True) for number in range(4, 8)),
    (1, False),
]


@settings(max_examples=60, deadline=None)
@example(READ_AHEAD_AND_THEN_FILLED, 8)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=60), st.integers(1, 8))
def test_a_ring_gives_what_was_written_last_however_it_is_used(uses: list[tuple[int, bool]], regions: int) -> None:
    store = DiskStore(None, torch.empty(0))
    sizes = {str(number): 100 - 30 * (number % 2) for number in range(regions)}
    for name, size in sizes.items():
        store.reserve(name, size, slots=1, lasting=False)
    store.open()
    ring, held, written = BufferRing(store, sizes), dict[int, int](), 0
    assert 100 * len(ring.buffers) <= sum(sizes.values()) and len(ring.buffers) == (1, 1, 2, 3, 4, 4, 4, 4)[regions - 1]
    for _ in range(2):  # the second time it is known what comes next
        ring.accesses.begin_step()
        for number, fill in ((number % regions, fill) for number, fill in uses):
            if fill or number not in held:
                written += 1
                held[number] = written % 251
                buffer = ring.blank(str(number))
                buffer.bytes.fill_(held[number])
                store.write(str(number), buffer)
            else:
                assert int(ring.fetch(str(number)).bytes[7]) == held[number]
    store.close()
