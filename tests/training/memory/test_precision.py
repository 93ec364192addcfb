"""fp16's loss scale skips what overflows and recovers; weights in bf16 are bf16."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn

from shoestring import Job
from shoestring.data.feed import Feed
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps
from shoestring.training.memory.precision import LossScale, Precision
from tests.models import job, seeded


def test_an_overflowing_step_is_skipped_and_training_recovers() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 16, generator=draw), torch.randn(8, 1, generator=draw)
    scaled_up = Job(
        model=lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)),
        data=lambda: [(x, y)] * 40,
        loss=lambda output, batch: 300_000 * nn.functional.mse_loss(output.float(), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-7),
    )
    model = seeded(scaled_up)
    before = [parameter.clone() for parameter in model.parameters()]
    run = build_run(scaled_up, (Precision("fp16"),), model)
    feed = Feed(scaled_up)
    first = next(steps(run, feed))
    scale = run.state["loss scale"]
    assert scale.state_dict()["skipped"] == 1 and torch.isfinite(first)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    losses = [float(loss) for loss in steps(run, islice(feed, 39))]
    assert losses[-1] < losses[0] and scale.state_dict()["skipped"] < 20


def test_the_scale_doubles_after_patience_and_its_state_can_be_restored() -> None:
    scale = LossScale(scale=8.0, patience=3)
    for finite in (True, True, True, False):
        scale.advance(finite)
    assert (scale.scale, scale.skipped) == (8.0, 1)
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict()


def test_bf16_weights_are_bf16_and_the_optimizer_moves_them() -> None:
    made = job("chain")
    model = seeded(made)
    losses = [
        float(loss) for loss in steps(build_run(made, (Precision("bf16", "bf16"),), model), islice(Feed(made), 16))
    ]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert losses[-1] < losses[0]
