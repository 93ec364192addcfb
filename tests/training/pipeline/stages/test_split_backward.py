"""A backward in two halves brings gradients from elsewhere once, and gives all weights theirs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.training.pipeline.stages.boundary import begin_with
from shoestring.training.pipeline.stages.split_backward import to_inputs, to_weights


def test_a_weight_whose_value_crosses_the_cut_as_it_is_waits_for_nobody_twice() -> None:
    """As T5's embedding of the decoder's words does, where the stage before the decoder looks them up."""
    torch.manual_seed(0)
    words, layer = nn.Embedding(5, 4), nn.Linear(4, 4)
    came = torch.randn(3, 4, requires_grad=True)
    brought: list[int] = []

    def bring() -> list[Tensor]:
        brought.append(1)
        return [torch.ones(3, 4), torch.full((2, 4), 2.0)]

    root = begin_with(bring, [layer(came), words(torch.tensor([1, 3]))])
    rest = to_inputs(root, [came], [*words.parameters(), *layer.parameters()])
    found = {id(weight): gradient for weight, gradient in to_weights(rest)}
    assert brought == [1] and came.grad is not None
    assert torch.equal(found[id(words.weight)], torch.zeros(5, 4).index_fill_(0, torch.tensor([1, 3]), 2.0))
    assert torch.allclose(found[id(layer.weight)], torch.ones(4, 3) @ came.detach())
