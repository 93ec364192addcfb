"""A weight that two stages use, in steps and places where one of them, or none, gives it a gradient: as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoestring.core.errors import Mistake
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.technique import TrainingTechnique as Technique
from tests.awkward import WIDTH
from tests.training.pipeline.cutting import alone, apart, cut
from tests.training.pipeline.partition.test_chain import NEAR, a_job


class Using(nn.Module):
    """A block with a layer of its own and one that others use too, in its own way."""

    def __init__(self, tied: nn.Linear, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.own, self.tied, self.use = nn.Linear(WIDTH, WIDTH), tied, use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)) + self.use(self.tied, x)


def plainly(tied: nn.Linear, x: Tensor) -> Tensor:
    return tied(x)  # type: ignore[no-any-return]


def reentrant(tied: nn.Linear, x: Tensor) -> Tensor:
    return checkpoint(tied, x, use_reentrant=True)  # type: ignore[no-any-return]


def detached(tied: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, tied.weight.detach(), tied.bias.detach())


def sometimes(tied: nn.Linear, x: Tensor) -> Tensor:
    return tied(x) if x.size(1) == 3 else x  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self, *uses: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        tied = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList(Using(tied, use) for use in uses)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.body:
            x = block(x)
        return x


PLANS: list[tuple[Pipeline, tuple[Technique, ...]]] = [
    (Pipeline(2, 2), ()),
    (Pipeline(2, 2, "zero-bubble"), ()),
    (Pipeline(2, 2), (DataParallel(),)),
    (Pipeline(2, 2), (Shard(1),)),
]


@pytest.mark.parametrize(
    "uses",
    [
        (reentrant, detached, detached, reentrant),
        (detached, plainly, reentrant, detached),
        (detached, plainly, plainly, detached),
        (detached, detached, plainly, plainly),
        (detached, detached, detached, detached),
        (sometimes, sometimes, sometimes, sometimes),
    ],
    ids=lambda uses: " ".join(use.__name__ for use in uses),
)
@pytest.mark.parametrize(("plan", "more"), PLANS, ids=["1f1b", "zero-bubble", "average", "shard"])
def test_a_tied_weight_has_the_gradient_of_one_process_or_none(
    uses: tuple[Callable[[nn.Linear, Tensor], Tensor], ...], plan: Pipeline, more: tuple[Technique, ...]
) -> None:
    """Also in later steps, in which weight decay would have moved one that has zeros; and where the model is looked at with a batch in
    which the weight is used, and no later one uses it."""
    batches = [torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(length)) for length in (3, 2, 2)]
    made = a_job(
        lambda: Tied(*uses),
        data=lambda: batches,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.05, weight_decay=0.5),
    )
    expected, found = alone(made, 3), cut(made, plan, 3, more, copies=2 if more else 1)
    if not any(isinstance(one, Shard) for one in more):
        assert found.gradients.keys() == expected.gradients.keys()
        assert apart(found, expected) <= NEAR
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_weight_that_a_stage_uses_in_two_reentrant_checkpoints_is_right_or_refused() -> None:
    """Its gradient comes twice in one backward, and after the first time it may have been sent to the other copies."""
    made = a_job(lambda: Tied(*[reentrant] * 4))
    assert apart(cut(made, Pipeline(2, 2), 3), alone(made, 3)) <= NEAR
    with pytest.raises(Mistake, match="use_reentrant=False"):
        cut(made, Pipeline(2, 2), 1, (DataParallel(),), copies=2)
