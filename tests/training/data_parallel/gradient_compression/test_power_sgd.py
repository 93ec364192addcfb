"""PowerSGD: what has rank r arrives whole, more rank leaves out less, and with feedback everything arrives in the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.private import FakeTensor
from shoestring.measure.fake import Stage
from shoestring.training.data_parallel.gradient_compression.error_feedback import ErrorFeedback
from shoestring.training.data_parallel.gradient_compression.power_sgd import PowerSGD

SHAPES = [(30, 20), (7,), (16, 3, 3, 3), (2, 2), ()]
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


def mean_of(workers: Sequence[PowerSGD], numbers: Sequence[Tensor], owed: bool = False) -> list[Tensor]:
    """What every worker has after both sums; with `owed`, what was sent is taken off the numbers."""
    pairs = list(zip(workers, numbers, strict=True))
    first = torch.stack([power.first(each) for power, each in pairs]).sum(0)
    seconds = [power.second(each, first) for power, each in pairs]
    for (power, each), second in zip(pairs, seconds, strict=True):
        assert power.counts == (first.numel(), second.numel())
        if owed:
            power.add(second, each, times=-1.0)
    second = torch.stack(seconds).sum(0)
    totals = []
    for power, each in pairs:
        totals.append(torch.zeros_like(each))
        power.add(second, totals[-1], times=1 / len(workers))
        power.warm(second)
    return totals


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int, rows: int, columns: int, seed: int) -> Tensor:
    return drawn(rows * rank, seed).view(rows, rank) @ drawn(rank * columns, seed + 1).view(rank, columns)


@settings(max_examples=40, deadline=None)
@given(
    rank=st.integers(1, 4),
    rows=st.integers(12, 40),
    columns=st.integers(12, 40),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-20, 1.0, 1e30]),
)
def test_a_matrix_of_that_rank_arrives_whole(rank: int, rows: int, columns: int, seed: int, scale: float) -> None:
    """From the seeded Q up to rounding and how near M Q is to less rank (a Q by chance nearly at right angles to M); warm, to 1e-5."""
    power, matrix = PowerSGD([(rows, columns)], rank), of_rank(rank, rows, columns, seed)
    seeded = power.right[0]
    stretch = float(matrix.norm() * seeded.norm() / torch.linalg.svdvals((matrix @ seeded).double())[-1])
    for allowed in (32 * 2**-24 * stretch, 1e-5):
        (mean,) = mean_of([power], [matrix.flatten() * scale])
        assert float((mean / scale - matrix.flatten()).abs().max()) < allowed * float(matrix.abs().max())


def test_more_rank_leaves_out_less_and_steps_find_the_best() -> None:
    left, right = torch.linalg.qr(drawn(1600, 0).view(40, 40)).Q, torch.linalg.qr(drawn(1600, 1).view(40, 40)).Q
    sizes = 0.7 ** torch.arange(40)
    matrix = left @ sizes.diag() @ right
    errors = []
    for rank in (1, 2, 4, 8, 16):
        power = PowerSGD([(40, 40)], rank)
        off = [float((mean_of([power], [matrix.flatten()])[0] - matrix.flatten()).norm()) for _ in range(12)]
        best = float(sizes[rank:].norm())  # Eckart, Young 1936: no matrix of this rank is nearer
        assert best * 0.999 <= off[-1] <= best * 1.02 and off[-1] < off[0] <= PowerSGD.error * float(matrix.norm())
        errors.append(off[-1])
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01 * errors[0]


def test_workers_have_the_same_bits_and_what_is_not_a_matrix_arrives_as_it_is() -> None:
    workers, numbers = [PowerSGD(SHAPES, 2) for _ in range(3)], [drawn(COUNT, seed) for seed in range(3)]
    means = mean_of(workers, numbers)
    assert all(torch.equal(means[0], mean) for mean in means)
    assert all(torch.equal(a, b) for one in workers for a, b in zip(one.right, workers[0].right, strict=True))
    mean = torch.stack(numbers).mean(0)
    torch.testing.assert_close(means[0][600:607], mean[600:607])
    torch.testing.assert_close(means[0][-5:], mean[-5:])
    assert not torch.allclose(means[0][:600], mean[:600], atol=0.1)
    assert workers[0].counts == (2 * (30 + 16), 2 * (20 + 27) + 7 + 4 + 1)


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=5), rank=st.integers(1, 3))
def test_any_shapes_can_be_sent_and_never_take_more(shapes: list[list[int]], rank: int) -> None:
    count = sum(torch.Size(shape).numel() for shape in shapes)
    power = PowerSGD(shapes, rank)
    (mean,) = mean_of([power], [drawn(count, 3)])
    assert sum(power.counts) <= count and mean.shape == (count,) and mean.isfinite().all()


def test_with_feedback_everything_arrives() -> None:
    workers, kept = [PowerSGD(SHAPES, 1) for _ in range(2)], [ErrorFeedback() for _ in range(2)]
    given_ = sent = torch.zeros(COUNT)
    gradients = [drawn(COUNT, 1), drawn(COUNT, 2)]
    off = []
    for step in range(1, 61):
        owed = [feedback.amount_owed("b", gradient) for feedback, gradient in zip(kept, gradients, strict=True)]
        sent = sent + mean_of(workers, owed, owed=True)[0]
        given_ = given_ + torch.stack(gradients).mean(0)
        off.append(float((sent - given_).norm()) / step)
    torch.testing.assert_close(
        sent + torch.stack([feedback.rest["b"] for feedback in kept]).mean(0), given_, rtol=0, atol=1e-3
    )
    assert off[-1] < 0.4 * off[0]


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_step_of_nothing_or_of_nonsense_is_got_over(bad: float) -> None:
    power, matrix = PowerSGD([(30, 20)], 2), of_rank(2, 30, 20, 5).flatten()
    mean_of([power], [matrix * bad])
    (again,) = mean_of([power], [matrix])
    torch.testing.assert_close(again, matrix, rtol=0, atol=1e-4)


def test_state_comes_back() -> None:
    power, other = PowerSGD(SHAPES, 2), PowerSGD(SHAPES, 2, seed=9)
    mean_of([power], [drawn(COUNT, 1)])
    other.load_state_dict(power.state_dict())
    assert torch.equal(mean_of([power], [drawn(COUNT, 2)])[0], mean_of([other], [drawn(COUNT, 2)])[0])


def test_it_can_be_rehearsed_on_fake_tensors() -> None:
    stage = Stage()
    for mode, fake in ((stage, stage.fake), (stage.fake, stage.fake)):  # the planner's, and torch's
        numbers, before = fake.from_tensor(torch.ones(COUNT)), PowerSGD(SHAPES, 2)
        with mode:
            for power in (before, PowerSGD(SHAPES, 2)):
                for _ in range(2):
                    (mean,) = mean_of([power], [numbers], owed=True)
                    assert isinstance(mean, FakeTensor) and mean.shape == (COUNT,)


def test_descent_with_feedback_reaches_the_optimum() -> None:
    targets = [drawn(COUNT, 1), drawn(COUNT, 2)]
    workers, kept = [PowerSGD(SHAPES, 1) for _ in range(2)], [ErrorFeedback() for _ in range(2)]
    x, best = torch.zeros(COUNT), torch.stack(targets).mean(0)
    for step in range(600):
        owed = [feedback.amount_owed("x", x - target) for feedback, target in zip(kept, targets, strict=True)]
        x = x - 0.05 * (1 - step / 600) * mean_of(workers, owed, owed=True)[0]
    assert float((x - best).norm()) < 0.01 * float(best.norm())


def test_a_rank_of_none_is_told_of() -> None:
    with pytest.raises(Mistake, match="1 or more"):
        PowerSGD(SHAPES, 0)
