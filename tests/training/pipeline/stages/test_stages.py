"""The engine of a pipeline where a backward has less to do than usual: parts are frozen, or a backward can't be halved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoestring.core.errors import Mistake
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.pipeline.pipeline import Pipeline
from tests.awkward import Work
from tests.training.pipeline.cutting import alone, apart, cut
from tests.training.pipeline.partition.test_chain import Body, a_job

NEAR = 2e-6


class Reentrant(Work):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class AroundBlocks(Body):
    """The block before a cut is called in a checkpoint."""

    around = (1,)

    def between(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.body):
            x = checkpoint(block, x, use_reentrant=True) if number in self.around else block(x)
        return x


class AroundTheNext(AroundBlocks):
    around = (2,)


class AroundTwo(Body):
    """The cut lies between two blocks of one checkpoint."""

    def between(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: self.body[2](self.body[1](y)), self.body[0](x), use_reentrant=True)
        return self.body[3](x)  # type: ignore[no-any-return]


class AroundAndLater(Body):
    """What a checkpoint that ends at a cut was given is used after the cut too, without a gradient."""

    def between(self, x: Tensor) -> Tensor:
        first = self.body[0](x)
        second = checkpoint(self.body[1], first, use_reentrant=True)
        return self.body[4](self.body[3](self.body[2](second + first.detach())))  # type: ignore[no-any-return]


def frozen_bottom() -> nn.Module:
    model = Body()
    for part in (model.first, *model.body[:1]):
        part.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "plan", [Pipeline(2, 2, "interleaved", chunks=2), Pipeline(2, 2), Pipeline(2, 3, "zero-bubble")], ids=str
)
def test_copies_add_up_their_gradients_though_the_last_backward_is_that_of_a_frozen_part(plan: Pipeline) -> None:
    made = a_job(frozen_bottom)
    assert apart(cut(made, plan, 2, (DataParallel(),), copies=2), alone(made, 2)) <= NEAR


@pytest.mark.parametrize(
    "model",
    [lambda: Body(Reentrant, 5), lambda: AroundBlocks(count=5), lambda: AroundAndLater(count=5)],
    ids=["inside of blocks", "around blocks", "detached later"],
)
@pytest.mark.parametrize(
    ("plan", "copies"),
    [
        (Pipeline(2, 2, "zero-bubble", balance=(2, 3)), 2),
        (Pipeline(3, 3, "zero-bubble", balance=(2, 1, 2)), 1),
        (Pipeline(2, 2, balance=(2, 3)), 1),
        (Pipeline(2, 2, "gpipe", balance=(2, 3)), 1),
        (Pipeline(2, 2, "interleaved", balance=(2, 1, 1, 1), chunks=2), 1),
    ],
    ids=str,
)
def test_a_reentrant_checkpoint_of_the_model_is_computed_as_in_one_process(
    model: Any, plan: Pipeline, copies: int
) -> None:
    made = a_job(model)
    assert apart(cut(made, plan, 2, (DataParallel(),) if copies > 1 else (), copies), alone(made, 2)) <= NEAR


@pytest.mark.parametrize("model", [AroundTheNext, AroundTwo], ids=lambda model: model.__name__)
def test_a_stage_that_begins_in_a_reentrant_checkpoint_is_refused(model: Any) -> None:
    """What arrives there is none of the checkpoint's inputs, so no gradient would come back."""
    with pytest.raises(Mistake, match=r"begins with body\.2, which the model calls where no gradients are recorded"):
        cut(a_job(model), Pipeline(2, 2))


def test_a_stage_that_begins_where_the_model_records_no_gradients_is_refused() -> None:
    class Looks(Body):
        def between(self, x: Tensor) -> Tensor:
            second = self.body[1](self.body[0](x))
            with torch.no_grad():
                size = self.body[2](second)
            return self.body[3](second + size)  # type: ignore[no-any-return]

    with pytest.raises(Mistake, match=r"begins with body\.2, which the model calls where no gradients are recorded"):
        cut(a_job(Looks), Pipeline(2, 2))
    made = a_job(Looks)
    assert apart(cut(made, Pipeline(2, 2, balance=(1, 3))), alone(made)) <= NEAR
