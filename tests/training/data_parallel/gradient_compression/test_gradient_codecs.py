"""Messages: as long as said, within the stated error, and with error feedback nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.private import FakeTensor, FakeTensorMode
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.measure.fake import Stage
from shoestring.training.data_parallel.gradient_compression.error_feedback import ErrorFeedback
from shoestring.training.data_parallel.gradient_compression.gradient_codecs import (
    CODECS,
    PAGE,
    CastCodec,
    Codec,
    Int8Codec,
    TopKCodec,
)

KINDS: dict[str, Codec] = {
    **CODECS,
    "topk of a third": TopKCodec(1 / 3),
    "topk of all": TopKCodec(1.0),
    "int8 in sevens": Int8Codec(7),
}
LENGTHS = st.one_of(
    st.integers(1, 60), st.sampled_from([1023, 1024, 1025, 3000, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 77])
)
TINY = torch.finfo(torch.float32).tiny
every = pytest.mark.parametrize("kind", KINDS)


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Numbers of one size or of many, some of them zero: from the smallest there are to the largest."""
    count, chance = draw(LENGTHS), torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scale = draw(st.sampled_from([0.0, 1e-44, 1e-38, 1e-20, 1e-8, 1.0, 1e4, 1e30, 3e38]))
    numbers = 2 * torch.rand(count, generator=chance) - 1
    if draw(st.booleans()):
        numbers *= 10.0 ** -torch.randint(0, 12, (count,), generator=chance)
    if draw(st.booleans()):
        numbers *= torch.rand(count, generator=chance) < 0.5
    return numbers * scale


def message(codec: Codec, numbers: Tensor) -> Tensor:
    """Between other bytes, as where messages stand one after another, and not clean before."""
    around = torch.full((codec.size(numbers.numel()) + 8,), 77, dtype=torch.uint8)
    codec.encode(numbers, around[4:-4])
    assert (around[:4] == 77).all() and (around[-4:] == 77).all()
    return around[4:-4]


def allowed(codec: Codec, numbers: Tensor) -> Tensor:
    """The stated error as a bound for every number, in float64 and with room for the rounding of float32."""
    exact = numbers.double()
    if isinstance(codec, CastCodec):
        smallest = torch.finfo(codec.dtype).smallest_normal * torch.finfo(codec.dtype).eps
        beyond = (exact.abs() - torch.finfo(codec.dtype).max).clamp_min(0)
        return (codec.error * exact.abs()).clamp_min(smallest) + beyond
    assert isinstance(codec, Int8Codec)
    largest = torch.stack([block.abs().max() for block in exact.split(codec.block)]).clamp_min(TINY)
    return codec.error * largest.repeat_interleave(codec.block)[: exact.numel()] * 1.0001


@every
@settings(max_examples=60, deadline=None)
@given(numbers=vectors())
def test_numbers_come_back_within_the_stated_error(kind: str, numbers: Tensor) -> None:
    codec = KINDS[kind]
    back = codec.decode(message(codec, numbers), numbers.numel())
    off = back.double() - numbers.double()
    assert back.dtype is torch.float32 and back.shape == numbers.shape and back.isfinite().all()
    if isinstance(codec, TopKCodec):
        assert off.norm() <= codec.error * numbers.double().norm() * 1.0001 + TINY
    else:
        assert (off.abs() <= allowed(codec, numbers)).all()


@every
@settings(max_examples=30, deadline=None)
@given(numbers=vectors())
def test_adding_a_message_is_adding_what_it_says(kind: str, numbers: Tensor) -> None:
    codec, total = KINDS[kind], torch.ones(numbers.numel(), dtype=torch.float32)
    sent = message(codec, numbers)
    codec.add(sent, total, times=-0.5)
    torch.testing.assert_close(total, 1 - 0.5 * codec.decode(sent, numbers.numel()), rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(numbers=vectors(), share=st.floats(1e-4, 1.0))
def test_topk_sends_the_largest_and_nothing_else(numbers: Tensor, share: float) -> None:
    codec = TopKCodec(share)
    kept = math.ceil(share * numbers.numel())
    back = codec.decode(message(codec, numbers), numbers.numel())
    sent = back != 0
    assert sent.sum() <= kept
    threshold = numbers.abs().sort(descending=True).values[kept - 1]
    assert (numbers.abs()[sent] >= threshold).all()
    larger = (numbers.abs() > threshold) & (numbers.abs() > TINY)
    assert sent[larger].all()
    torch.testing.assert_close(back[larger], numbers[larger], rtol=2**-8, atol=0)


def test_a_message_is_as_long_as_it_should_be() -> None:
    for count in (0, 1, 2, 1024, 1025, 999_999):
        assert CODECS["fp16"].size(count) == CODECS["bf16"].size(count) == 4 * math.ceil(count / 2)
        assert CODECS["int8"].size(count) == 4 * math.ceil(count / 1024) + 4 * math.ceil(count / 4)
        assert CODECS["topk"].size(count) == 4 * math.ceil(count / PAGE) + 8 * math.ceil(math.ceil(count / 100) / 2)
    shorter = {kind: 4_000_000 / codec.size(1_000_000) for kind, codec in CODECS.items()}
    assert shorter["fp16"] == shorter["bf16"] == 2 and shorter["int8"] > 3.98 and shorter["topk"] > 99


@every
def test_the_same_numbers_give_the_same_bytes_and_none_give_none(kind: str) -> None:
    numbers, codec = torch.randn(5001, generator=torch.Generator().manual_seed(1)), KINDS[kind]
    clean = torch.zeros(codec.size(5001), dtype=torch.uint8)
    codec.encode(numbers, clean)
    assert torch.equal(message(codec, numbers), clean)
    assert codec.size(0) == 0 and codec.decode(message(codec, numbers[:0]), 0).shape == (0,)


def test_fp16_never_gives_infinity() -> None:
    numbers = torch.tensor([65_504.0, 65_519.0, 65_520.0, 1e30, -1e30, torch.finfo(torch.float32).max])
    for dtype in (torch.float16, torch.bfloat16):
        back = CastCodec(dtype).decode(message(CastCodec(dtype), numbers), 6)
        assert back.isfinite().all() and torch.equal(back.sign(), numbers.sign())
    assert CODECS["fp16"].decode(message(CODECS["fp16"], numbers), 6).abs().tolist() == [65_504.0] * 6


@every
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_by_the_receiver_and_forgotten_by_the_sender(kind: str, bad: float) -> None:
    codec, feedback = KINDS[kind], ErrorFeedback()
    numbers = torch.linspace(-1, 1, 3000)
    sent = torch.empty(codec.size(3000), dtype=torch.uint8)
    for gradient, finite in ((numbers.index_fill(0, torch.tensor(2000), bad), False), (numbers, True)):
        feedback.encode("b", gradient, codec, sent)
        assert bool(codec.decode(sent, 3000).isfinite().all()) is finite


@every
@settings(max_examples=20, deadline=None)
@given(count=LENGTHS, seed=st.integers(0, 1000))
def test_what_was_sent_and_what_is_kept_is_what_was_given(kind: str, count: int, seed: int) -> None:
    codec, feedback, chance = KINDS[kind], ErrorFeedback(), torch.Generator().manual_seed(seed)
    given_, sent = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for _ in range(20):
        gradient = torch.randn(count, generator=chance)
        into = torch.empty(codec.size(count), dtype=torch.uint8)
        feedback.encode("b", gradient, codec, into)
        given_ += gradient
        sent += codec.decode(into, count)
    torch.testing.assert_close(sent + feedback.rest["b"], given_, rtol=0, atol=1e-4)
    if kind not in ("topk", "topk of a third"):
        torch.testing.assert_close(sent, given_, rtol=0, atol=0.03)  # what is kept does not grow


def test_buckets_are_kept_apart_and_come_back_only_for_as_many_workers() -> None:
    feedback, codec = ErrorFeedback(on_one_axis(Link(1, 2))), CODECS["int8"]
    for bucket, count in (("a", 10), ("b", 20)):
        feedback.encode(bucket, torch.linspace(0.1, 1, count), codec, torch.empty(codec.size(count), dtype=torch.uint8))
    again, other = ErrorFeedback(on_one_axis(Link(1, 2))), ErrorFeedback(on_one_axis(Link(1, 3)))
    told = feedback.state_dict()
    assert sorted(told["kept"]) == ["0 a", "0 b", "1 a", "1 b"]  # imagined: the other one has as much
    state = told | {"kept": {key: next(one.pieces()) for key, one in told["kept"].items()}}
    again.load_state_dict(state)
    other.load_state_dict(state)
    assert all(torch.equal(again.rest[bucket], feedback.rest[bucket]) for bucket in ("a", "b"))
    assert torch.equal(other.amount_owed("a", torch.ones(10)), torch.ones(10))
    assert feedback.rest["a"].any() and feedback.rest["b"].any()
    before = feedback.rest["a"].clone()
    again.amount_owed("a", torch.ones(10))
    assert torch.equal(feedback.rest["a"], before)  # loading took a copy


@every
def test_codecs_can_be_rehearsed_on_fake_tensors(kind: str) -> None:
    codec, stage, feedback = KINDS[kind], Stage(), ErrorFeedback()
    fake = FakeTensorMode()
    for mode, numbers in (
        (fake, fake.from_tensor(torch.ones(70_001))),
        (stage, stage.fake.from_tensor(torch.ones(70_001))),
    ):
        with mode:  # torch's, and the planner's
            feedback.rest.clear()
            into = numbers.new_empty(codec.size(70_001), dtype=torch.uint8)
            feedback.encode("b", numbers, codec, into)
            back = codec.decode(into, 70_001)
            codec.add(into, numbers)
        assert isinstance(back, FakeTensor) and back.shape == (70_001,) and back.dtype is torch.float32


def distance_after(sent: Callable[[int, Tensor], Tensor], steps: int = 1500) -> float:
    """How far from the optimum gradient descent of three workers ends, of a distance of 10.2 at the beginning.

    Each has the loss |x - t_w|^2 / 2. In one place their targets differ more than elsewhere, and the differences cancel out:
    that place is all that top-k ever sends without feedback. With it, the end is nearer the longer the descent and the less they differ.
    """
    chance = torch.Generator().manual_seed(0)
    targets = torch.randn(100, generator=chance) + 0.1 * torch.randn(3, 100, generator=chance)
    targets[:, 17] += torch.tensor([2.5, 2.5, -5.0])
    x = torch.zeros(100)
    for step in range(steps):
        mean = torch.stack([sent(worker, x - target) for worker, target in enumerate(targets)]).mean(0)
        x -= 0.02 * (1 - step / steps) * mean
    return float((x - targets.mean(0)).norm())


@every
def test_descent_with_feedback_reaches_the_optimum(kind: str) -> None:
    codec, workers = KINDS[kind], [ErrorFeedback() for _ in range(3)]

    def sent(worker: int, gradient: Tensor) -> Tensor:
        into = torch.empty(codec.size(100), dtype=torch.uint8)
        workers[worker].encode("x", gradient, codec, into)
        return codec.decode(into, 100)

    assert distance_after(sent) < 0.1


def test_topk_without_feedback_does_not() -> None:
    codec = CODECS["topk"]
    assert distance_after(lambda worker, gradient: codec.decode(message(codec, gradient), 100)) > 5


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_a_share_that_is_none_is_told_of(share: float) -> None:
    with pytest.raises(Mistake, match="above 0 and at most 1"):
        TopKCodec(share)
