"""Weights are in memory that forks share, and compute what they did."""

from __future__ import annotations

import os

import torch
from torch import nn

from shoestring.serving.engines.shared_weights import share_weights


def test_a_fork_sees_what_is_written_and_ties_hold() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.LSTM(5, 6, batch_first=True)).eval()
    model[0].register_buffer("part", model[0].weight.data.view(-1)[3:9])
    batch = torch.randn(2, 3, 7)
    wanted = model(batch)[0]
    assert share_weights(model) >= sum(one.nbytes for one in model.parameters())
    assert torch.equal(model(batch)[0], wanted)
    child = os.fork()
    if not child:
        with torch.no_grad():
            model[0].weight.fill_(3.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert bool((model[0].weight == 3).all()) and bool((model[0].part == 3).all())


def test_a_model_without_weights_shares_nothing() -> None:
    assert share_weights(nn.ReLU()) == 0
