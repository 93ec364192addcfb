"""The engine of a pipeline where a backward has less to do than usual: parts are frozen, or a backward can't be halved."""
from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoestring.core.errors import Mistake
from shoestring.parallel.average import Average
from shoestring.parallel.pipeline import Pipeline
from tests.awkward import Work
from tests.parallel.cutting import alone, apart, cut
from tests.parallel.test_chain import Body, a_job

NEAR = 2e-6


class Reentrant(Work):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)   # type: ignore[no-any-return]


class AroundBlocks(Body):
    """The block before a cut is called in a checkpoint."""

    around = (1,)

    def between(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.body):
            x = checkpoint(block, x, use_reentrant=True) if number in self.around else block(x)
        return x


class AroundTheNext(AroundBlocks):
    around = (2,)


def frozen_bottom() -> nn.Module:
    model = Body()
    for part in (model.first, *model.body[:1]):
        part.requires_grad_(False)
    return model


@pytest.mark.parametrize("plan", [Pipeline(2, 2, "interleaved", chunks=2), Pipeline(2, 2), Pipeline(2, 3, "zero-bubble")], ids=str)
def test_copies_add_up_their_gradients_though_the_last_backward_is_that_of_a_frozen_part(plan: Pipeline) -> None:
    made = a_job(frozen_bottom)
    assert apart(cut(made, plan, 2, (Average(),), copies=2), alone(made, 2)) <= NEAR


@pytest.mark.parametrize("model", [lambda: Body(Reentrant), AroundBlocks], ids=["inside of blocks", "around blocks"])
@pytest.mark.parametrize(("plan", "copies"), [
    (Pipeline(2, 2, "zero-bubble"), 2), (Pipeline(3, 3, "zero-bubble", balance=(2, 1, 1)), 1), (Pipeline(2, 2), 1)], ids=str)
def test_a_reentrant_checkpoint_of_the_model_is_computed_as_in_one_process(model: Any, plan: Pipeline, copies: int) -> None:
    made = a_job(model)
    assert apart(cut(made, plan, 2, (Average(),) if copies > 1 else (), copies), alone(made, 2)) <= NEAR


def test_a_stage_that_begins_in_a_reentrant_checkpoint_is_refused() -> None:
    """What arrives there is none of the checkpoint's inputs, so no gradient would come back."""
    with pytest.raises(Mistake, match=r"begins with body\.2, which the model calls where no gradients are recorded"):
        cut(a_job(AroundTheNext), Pipeline(2, 2))
