"""What modules keep from call to call, where a forward calls them in several places: as in one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.technique import TrainingTechnique as Technique
from tests.awkward import WIDTH
from tests.models import seeded
from tests.training.pipeline.cutting import Found, apart, cut, last_loss, of_buffers, of_gradients, still
from tests.training.pipeline.partition.test_chain import Body, a_job

NEAR = 2e-6


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.own, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.own(x))) + x


class OneNorm(Body):
    """Four blocks that share a norm."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(WIDTH, momentum=0.3)) -> None:
        shared = norm()
        super().__init__(lambda: Normed(shared))


class Twice(Body):
    """Blocks with a norm each, of which the second is called again: `order` says when."""

    order = (0, 1, 1, 2, 3)

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(WIDTH, momentum=0.3)) -> None:
        super().__init__(lambda: Normed(norm()))

    def between(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.body[number](x)
        return x


class Back(Twice):
    """A U-Net's way: down, and up through the same blocks."""

    order = (0, 1, 2, 3, 2, 1, 0)


def in_pieces(made: object, pieces: int, count: int) -> Found:
    """One process that computes the same pieces one after the other."""
    run = build_run(made, (Accumulate(pieces),), still(seeded(made)))  # type: ignore[arg-type]
    return Found(last_loss(run, made, count), of_gradients(run.model), of_buffers(run.model))  # type: ignore[arg-type]


def test_a_norm_that_is_called_twice_in_one_stage_is_that_of_one_process() -> None:
    made = a_job(Twice)
    assert apart(cut(made, Pipeline(2, 2, balance=(3, 2)), 3), in_pieces(made, 2, 3)) <= NEAR


@pytest.mark.parametrize("model", [OneNorm, Back], ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    ("plan", "more"),
    [
        (Pipeline(2, 3), ()),
        (Pipeline(3, 2, "gpipe", balance=(1, 2, 1)), ()),
        (Pipeline(2, 2, "interleaved", chunks=2), ()),
        (Pipeline(2, 2, "zero-bubble"), ()),
        (Pipeline(2, 3), (Checkpoint(every=1),)),
    ],
    ids=str,
)
def test_a_norm_that_several_stages_call_has_the_statistics_of_one_process(
    model: type[Body], plan: Pipeline, more: tuple[Technique, ...]
) -> None:
    plan = replace(plan, balance=(2, 3, 2)) if plan.balance and model is Back else plan
    """In double precision: a bias before a norm has the gradient zero, but for rounding."""
    batches = [
        torch.randn(24, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    ]
    made = a_job(lambda: model().double(), data=lambda: batches)
    found, expected = cut(made, plan, 3, more), in_pieces(made, plan.pieces, 3)
    assert any(bool((one - one.round()).any()) for one in expected.buffers.values()) and apart(found, expected) <= NEAR


def test_a_norm_that_is_not_trained_keeps_its_statistics() -> None:
    class Frozen(OneNorm):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.body[0].norm.eval()
            return self

    def model() -> Frozen:
        made = Frozen()
        made.body[0].norm.running_var.fill_(4.0)  # type: ignore[union-attr, operator]
        return made

    made = a_job(model)
    assert apart(cut(made, Pipeline(2, 2), 3), in_pieces(made, 2, 3)) <= NEAR


def test_statistics_that_another_stage_reads_are_refused() -> None:
    class Reads(Twice):
        order = (0, 1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.body[0].norm.running_var.mean()  # type: ignore[no-any-return, union-attr, operator]

    with pytest.raises(Mistake, match=r"keeps something from call to call \(in body\.0\.norm\.running_var"):
        cut(a_job(Reads), Pipeline(2, 2))


def unnoted(count: int) -> type[nn.Module]:
    class Unnoted(nn.Module):
        """Statistics that a function writes without a word, and no counter."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(count))
            self.register_buffer("spread", torch.ones(count))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x, self.mean, self.spread, training=True)  # type: ignore[arg-type]

    return Unnoted


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize("model", [OneNorm, Back], ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    "norm",
    [unnoted(WIDTH), Counting, lambda: nn.BatchNorm1d(WIDTH, momentum=None)],
    ids=["by a function", "in Python", "cumulative"],
)
def test_what_two_stages_would_keep_apart_is_refused(
    model: Callable[..., nn.Module], norm: Callable[[], nn.Module]
) -> None:
    with pytest.raises(Mistake, match=r"keeps something from call to call \(in body\.\d\.norm"):
        cut(a_job(lambda: model(norm)), Pipeline(2, 2))
