"""Streamed from disk: the same bits, the predicted bytes, and nothing damaged whatever happens to the file."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.model.swap import Swap
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.running.run_weights import bring_home
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.runs.weights.initial_weights import fill_weights
from shoestring.runs.weights.tensors import write_tensors
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload import disk_store, offloaded_optimizer, row_split, streaming
from shoestring.training.memory.offload import offload_model as stream
from shoestring.training.memory.offload import offload_optimizer as offload
from shoestring.training.memory.offload.disk_store import PAGE, DiskStore
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import HostOptimizer, OffloadOptimizer
from shoestring.training.memory.offload.offloaded_optimizer import AccessOrder
from shoestring.training.memory.offload.streaming import Streaming
from shoestring.training.memory.optimizers import eight_bits
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import job, seeded


def trained(made: Job, techniques: tuple[Technique, ...], count: int = 4, **more: Any) -> tuple[dict[str, Tensor], Run]:
    run = build_run(made, techniques, seeded(made), **more)
    for _ in steps(run, islice(Feed(made), count)):
        pass
    bring_home(run)
    return run.model.state_dict(), run


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one if one[name].numel())


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the smallest models are cut into chunks and rows."""
    for module in (offloaded_optimizer, offload, streaming):
        monkeypatch.setattr(module, "SMALL", 256)
    for module in (offloaded_optimizer, row_split, stream, offload):
        monkeypatch.setattr(module, "CHUNK", 4096)


@pytest.mark.parametrize(
    "name", ["chain", "dropout chain", "recurrent", "u-net", "gpt2", "llama", "t5", "vit", "resnet", "mixtral"]
)
def test_a_streamed_model_is_trained_to_the_same_bits(name: str) -> None:
    made = job(name)
    assert apart(trained(made, (FusedOptimizer(),))[0], trained(made, (FusedOptimizer(), OffloadModel()))[0]) == 0.0


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
        lambda parameters: torch.optim.AdamW(
            [{"params": parameters[:5], "lr": 1e-2}, {"params": parameters[5:]}], weight_decay=0.1
        ),
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    ],
)
def test_the_users_own_optimizer_steps_what_is_streamed(optimizer: Any, tiny: None) -> None:
    made = job("chain", optimizer=lambda parameters: optimizer(list(parameters)))
    assert apart(trained(made, ())[0], trained(made, (OffloadModel(),))[0]) == 0.0


class ByMark(torch.optim.AdamW):
    """Climbs by weights that the model has marked."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            one.grad.mul_(-1.0 if one.climbs else 1.0)
        super().step()


@pytest.mark.parametrize("technique", [OffloadModel(), OffloadOptimizer("disk"), OffloadOptimizer("host")])
def test_an_optimizer_finds_the_marks_that_a_model_has_set(technique: Technique, tiny: None) -> None:
    def marked() -> nn.Module:
        model = job("chain").model()
        for one in model.parameters():
            one.climbs = one.dim() > 1  # type: ignore[attr-defined]
        return model

    made = replace(job("chain", optimizer=lambda parameters: ByMark(parameters, lr=1e-2)), model=marked)
    assert apart(trained(made, ())[0], trained(made, (technique,))[0]) == 0.0


@pytest.mark.parametrize("technique", [OffloadOptimizer("disk"), OffloadOptimizer("host")])
@pytest.mark.parametrize("more", [(), (FusedOptimizer(), StepInBackward()), (Accumulate(2),)])
def test_moments_elsewhere_give_the_same_bits(technique: Technique, more: tuple[Technique, ...], tiny: None) -> None:
    for name in ("chain", "gpt2"):
        made = job(name, clip=0.0 if StepInBackward() in more else 0.5)
        assert apart(trained(made, more)[0], trained(made, (*more, technique))[0]) == 0.0


@pytest.mark.parametrize("here", [True, False], ids=["on the CPU", "as from a GPU"])
def test_an_update_in_blocks_on_the_host_gives_the_same_bits(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 64)
    made = job("gpt2")
    model, other = seeded(made), seeded(made)
    plain, hosted = made.optimizer(list(model.parameters())), HostOptimizer(made.optimizer(list(other.parameters())))
    if not here:
        monkeypatch.setattr(HostOptimizer, "here", lambda self, parameter: False)
        monkeypatch.setattr(Tensor, "to", lambda tensor, place: tensor.clone())
    for number in range(3):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.full_like(one, 0.1 * (number + 1))
            two.grad = one.grad.clone()
        plain.step()
        hosted.step_in_blocks()
    assert apart(model.state_dict(), other.state_dict()) == 0.0


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "whisper"])
def test_a_large_head_and_a_tied_one_are_cut_and_stay_within_rounding(name: str, tiny: None) -> None:
    made = job(name)
    after, run = trained(made, (OffloadModel(),))
    assert run.state["stream"].row_splits  # type: ignore[attr-defined]
    assert apart(trained(made, ())[0], after) <= 1e-4


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_tied_head_in_one_slice_gives_the_same_bits(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (offloaded_optimizer, streaming):
        monkeypatch.setattr(module, "SMALL", 256)
    made = job("gpt2", optimizer=lambda parameters: optimizer(parameters, lr=1e-3, fused=True))
    after, run = trained(made, (OffloadModel(),))
    (whole,) = run.state["stream"].row_splits.values()  # type: ignore[attr-defined]
    assert len(whole.spans) == 1
    assert apart(trained(made, ())[0], after) == 0.0


@given(st.integers(1, 100_000), st.integers(1, 1 << 24))
def test_a_slice_is_whole_vectors_and_no_more_than_a_chunk(width: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_split, "CHUNK", chunk)
        rows = row_split.rows_at_once(nn.Parameter(torch.empty(3, width, device="meta")))
    assert rows >= 1 and rows * width % row_split.VECTOR == 0 and rows * width <= max(chunk, row_split.VECTOR * width)


def test_a_file_system_without_direct_input_and_output_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained(job("chain"), (OffloadModel(),), folder=tmp_path)[1].state["stream"].remark == ""  # type: ignore[attr-defined]
    real = os.open

    def refused(name: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", refused)
    run = trained(job("chain"), (OffloadModel(),), folder=tmp_path)[1]
    assert "has no direct I/O" in run.state["stream"].remark  # type: ignore[attr-defined]


@pytest.mark.parametrize("technique", [OffloadModel(), OffloadOptimizer()])
@pytest.mark.parametrize("name", ["chain", "gpt2"])
def test_bytes_in_memory_and_bytes_on_the_way_are_as_predicted(name: str, technique: Technique, tiny: None) -> None:
    made = job(name)
    predicted, measured = rehearse(made, (technique,)), track(made, (technique,), seeded(made))
    assert peak(predicted).bytes == peak(measured).bytes
    assert predicted.moved == measured.moved and predicted.moved[1] > 0


@given(numpy.arrays(np.float32, st.integers(1, 700), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)))
def test_eight_bits_keep_to_the_error_that_they_state(drawn: np.ndarray) -> None:
    numbers = torch.from_numpy(drawn.copy())
    for positive, error in ((False, eight_bits.SIGNED), (True, eight_bits.POSITIVE)):
        given_ones = numbers.abs() if positive else numbers
        held = torch.empty(eight_bits.size(len(numbers)), dtype=torch.uint8)
        eight_bits.pack(given_ones, held, positive)
        found = eight_bits.unpack(held, len(numbers), positive)
        for begin in range(0, len(numbers), eight_bits.BLOCK):
            part, other = given_ones[begin : begin + eight_bits.BLOCK], found[begin : begin + eight_bits.BLOCK]
            assert (part - other).abs().max() <= error * part.abs().max() + 1e-30
            if positive:
                assert (other >= part * (1 - 1e-5) - 1e-36).all()


@pytest.mark.parametrize("technique", [OffloadModel(moments="8bit"), OffloadOptimizer(moments="8bit")])
def test_moments_in_eight_bits_train_nearly_as_well(technique: Technique, tiny: None) -> None:
    made = job("chain", optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    plans: tuple[tuple[Technique, ...], ...] = ((), (technique,))
    losses = [
        [float(loss) for loss in steps(build_run(made, plan, seeded(made)), islice(Feed(made), 12))] for plan in plans
    ]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert abs(losses[1][-1] - losses[0][-1]) <= 0.05 * losses[0][0]


def test_a_weight_that_is_used_outside_of_its_module_is_noticed_in_the_rehearsal() -> None:
    with pytest.raises(Mistake, match=r"rel_embeddings.weight outside of the module"):
        rehearse(job("deberta"), (OffloadModel(),))


def test_weights_that_take_no_part_are_kept_as_they_are(tiny: None) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.used(x).relu()

    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    made = Job(
        model=lambda: nn.Sequential(*(Layer() for _ in range(5))),
        data=lambda: [batch] * 8,
        loss=lambda output, batch: output.square().mean(),
    )
    assert apart(trained(made, ())[0], trained(made, (OffloadModel(),))[0]) == 0.0


def test_a_model_made_in_little_memory_has_the_values_of_one_made_in_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.core.model.swap.SMALL", 1024)
    made = job("bert")
    plain = seeded(made).state_dict()
    random_state.seed(made.seed)
    with Swap(room=1 << 16) as swap:
        model = made.model()
        assert swap.held <= (1 << 16) + max(value.nbytes for value in plain.values())
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())


def test_a_disk_that_is_full_while_a_model_is_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shoestring.core.model.swap.os.pwrite", full)
    with (
        pytest.raises(Mistake, match=r"wait in a file in .* \(No space left on device\): free some space there"),
        Swap(room=1 << 16),
    ):
        nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))


def test_a_model_made_on_the_meta_device_has_the_values_of_one_made_as_usual(tmp_path: Path) -> None:
    def made(device: str) -> nn.Module:
        with torch.device(device):
            return nn.MultiheadAttention(8, 2)

    plain = Job(
        model=lambda: nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7)), nn.LSTM(7, 5)),
        data=list,
    )

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return plain.model()

    random_state.seed(3)
    usual = plain.model().state_dict()
    random_state.seed(3)
    made_on_meta = fill_weights(on_meta(), plain).state_dict()
    assert all(torch.equal(value, made_on_meta[name]) for name, value in usual.items())
    write_tensors(tmp_path / "weights.safetensors", usual)
    read = fill_weights(on_meta(), replace(plain, weights=str(tmp_path / "weights.safetensors"))).state_dict()
    assert all(torch.equal(value, read[name]) for name, value in usual.items())
    with pytest.raises(Mistake, match="MultiheadAttention has no reset_parameters"):
        fill_weights(made("meta"), plain)


def test_a_meta_model_is_planned_and_trained(tmp_path: Path) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(
                *(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)), nn.Linear(64, 10)
            )

    made = Job(model=on_meta, data=lambda: [(torch.ones(4, 64), torch.zeros(4, dtype=torch.long))] * 4, steps=3)
    random_state.seed(made.seed)
    model = fill_weights(on_meta(), made)
    assert peak(rehearse(made, (OffloadModel(),))).bytes == peak(track(made, (OffloadModel(),), model)).bytes


# The disk store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore(tmp_path / "state.bin", torch.empty(0))
    made.reserve("first", 10_000)
    made.reserve("second", 5_000)
    made.open()
    yield made
    made.close()


def put(made: DiskStore, name: str, value: int) -> None:
    buffer = made.buffer(10_000)
    buffer.bytes.fill_(value)
    made.write(name, buffer)
    buffer.wait()


def got(made: DiskStore, name: str) -> int:
    buffer = made.buffer(10_000)
    made.read(name, buffer)
    buffer.wait()
    return int(buffer.bytes[0])


def test_what_a_checkpoint_stands_on_is_never_written_over(store: DiskStore, tmp_path: Path) -> None:
    put(store, "first", 1)
    state = store.state_dict()
    store.pin()
    for value in (2, 3):
        put(store, "first", value)
    assert got(store, "first") == 3
    again = DiskStore(tmp_path / "state.bin", torch.empty(0))
    again.reserve("first", 10_000)
    again.reserve("second", 5_000)
    again.open()
    again.load_state_dict(state)
    assert got(again, "first") == 1
    put(again, "first", 4)
    assert got(again, "first") == 4


def test_a_flipped_bit_is_noticed_when_it_is_read(store: DiskStore, tmp_path: Path) -> None:
    put(store, "first", 1)
    store.settle()
    with open(tmp_path / "state.bin", "r+b") as file:
        file.seek(store.regions["first"].offset + 7_000)
        file.write(b"\x03")
    with pytest.raises(Mistake, match=r"first in .*state.bin is not what was written"):
        got(store, "first")


def test_damage_to_what_no_checkpoint_stands_on_leaves_the_checkpoint_to_go_on_from(
    store: DiskStore, tmp_path: Path
) -> None:
    put(store, "first", 1)
    state = store.state_dict()
    store.pin()
    put(store, "first", 2)
    store.settle()
    region = store.regions["first"]
    with open(tmp_path / "state.bin", "r+b") as file:
        file.seek(region.offset + region.current * region.size + 7_000)
        file.write(b"\x03")
    with pytest.raises(Mistake, match="does not stand on that, and the same command goes on from there"):
        got(store, "first")
    store.load_state_dict(state)
    region.pending = None
    assert got(store, "first") == 1


def test_a_shorter_file_is_noticed(store: DiskStore, tmp_path: Path) -> None:
    put(store, "first", 1)
    os.truncate(tmp_path / "state.bin", PAGE)
    with pytest.raises(Mistake, match="shorter than it was"):
        got(store, "first")


def test_too_little_room_on_the_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    made = DiskStore(tmp_path / "state.bin", torch.empty(0))
    made.reserve("everything", 1 << 50)
    with pytest.raises(Mistake, match=r"needs .* on the disk of .* are free"):
        made.open()
    assert not (tmp_path / "state.bin").exists()


def test_a_disk_that_fails_says_so_and_leaves_the_checkpoint_whole(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "first", 1)
    store.state_dict()
    store.pin()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "pwrite", full)
        with pytest.raises(Mistake, match="No space left on device; the last checkpoint is intact"):
            put(store, "first", 2)
    store.regions["first"].current = store.regions["first"].pinned or 0
    store.regions["first"].pending = None
    assert got(store, "first") == 1


def test_another_layout_is_refused(store: DiskStore, tmp_path: Path) -> None:
    put(store, "first", 1)
    other = DiskStore(tmp_path / "state.bin", torch.empty(0))
    other.reserve("first", 20_000)
    with pytest.raises(Mistake, match="laid out for another model"):
        other.load_state_dict(store.state_dict())


def test_the_order_of_the_step_before_says_what_comes_next() -> None:
    order = AccessOrder(["a", "b", "c"])
    assert order.next_after("a", 2) == ["b", "c"] and order.next_after("x", 1) == []
    order.begin_step()
    assert order.next_after("a", 1) == ["x"]


class Wide(nn.Module):
    """An embedding that is larger than all blocks together, and far smaller than what passes through memory at once."""

    def __init__(self, depth: int, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1200, 32), nn.Linear(32, 1200, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(depth))

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    """Few weights, all of them in one or two blocks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(128 if number else 16, 128, batch_first=True) for number in range(layers))
        self.head = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


def small_job(model: nn.Module) -> Job:
    ids = isinstance(model, Wide)
    batch = (
        (torch.randint(0, 1200, (2, 3)), torch.randint(0, 1200, (2, 3)))
        if ids
        else (torch.randn(2, 3, 16), torch.tensor([0, 1]))
    )
    return Job(
        model=lambda: copy.deepcopy(model),
        data=[batch],
        forward=lambda m, b: m(b[0]),
        loss=lambda out, b: nn.functional.cross_entropy(out.flatten(0, -2), b[1].flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        steps=3,
    )


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(
    "model",
    [Wide(1, tied=True), Wide(5, tied=True), Wide(1, tied=False), Recurrent(1), Recurrent(2), Recurrent(5)],
    ids=["tied", "tied and deep", "untied", "one LSTM", "two LSTMs", "five LSTMs"],
)
def test_buffers_take_no_more_memory_than_what_passes_through_them(model: nn.Module, clip: float) -> None:
    """Of every kind there are several buffers, each as large as the largest region: for a small model that is more than all of it."""
    made = replace(small_job(model), clip=clip)
    weights, run = trained(made, (OffloadModel(),))
    streaming = run.state["stream"]
    assert isinstance(streaming, Streaming)
    weight = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    spare = (
        PAGE * 3 * len(streaming.buffers)
    )  # each begins at a page, ends at one, and is in units whose weights do so too
    # Weights, their gradients where they are used twice or wait for the norm, and two moments
    assert (
        sum(buffer.numel() for buffer in streaming.buffers)
        <= (1 + isinstance(model, Wide) + bool(clip) + 2) * weight + spare
    )
    assert apart(trained(made, ())[0], weights) <= (1e-6 if isinstance(model, Wide) else 0.0)


class Reversible(torch.autograd.Function):
    """Computes layers again in backward by their parts, as Reformer does: no layer is called there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers, ctx.inputs = layers, []
        for layer in layers:
            ctx.inputs.append(x)
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0]
        for layer, x in zip(reversed(ctx.layers), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                out = layer[1](layer[0](given))
            out.backward(gradient)
            assert given.grad is not None
            gradient = given.grad
        return gradient, None


class ReversibleModel(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 128)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(128, 4)
        self.layers.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Any:
        return self.head(Reversible.apply(self.first(x), self.layers).mean(1))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_that_calls_parts_of_blocks_is_noticed(frozen: bool) -> None:
    """Frozen weights have no gradient whose hook would see it: the first layer would learn from numbers that are not there."""
    made = replace(small_job(Recurrent(1)), model=lambda: ReversibleModel(frozen))
    with pytest.raises(
        Mistake, match=r"uses the weight layers\..*outside of the module that it belongs to.*plan without OffloadModel"
    ):
        rehearse(made, (OffloadModel(),))
    with pytest.raises(Mistake, match="outside of the module"):
        trained(made, (OffloadModel(),))
