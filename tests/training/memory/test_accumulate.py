"""Accumulation is equal to plain training for uneven pieces and for losses that are means over tokens."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job, Mistake
from shoestring.core.batch import samples, split
from shoestring.data.feed import Feed
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate


def masked_job() -> Job:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(20, (7, 9), generator=draw)
    targets = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, -100)

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)

    return Job(
        model=lambda: nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)),
        data=lambda: [{"ids": ids, "targets": targets}] * 5,
        forward=lambda model, batch: model(batch["ids"]),
        loss=loss,
        weight=lambda batch: int((batch["targets"] != -100).sum()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )


def weights(made: Job, *techniques: Accumulate) -> Tensor:
    torch.manual_seed(0)
    model = made.model()
    for _ in steps(build_run(made, techniques, model), islice(Feed(made), 5)):
        pass
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("pieces", [2, 3, 5, 7])
def test_uneven_pieces_with_a_mean_over_valid_tokens_equal_plain_training(pieces: int) -> None:
    assert torch.allclose(weights(masked_job(), Accumulate(pieces)), weights(masked_job()), atol=1e-6)


def test_counting_samples_instead_of_tokens_would_be_wrong() -> None:
    from dataclasses import replace

    careless = replace(masked_job(), weight=samples)
    assert not torch.allclose(weights(careless, Accumulate(3)), weights(careless), atol=1e-6)


def test_nested_batches_are_cut_by_sample_and_the_rest_is_shared() -> None:
    batch = {
        "a": (torch.arange(5), [torch.zeros(5, 2)]),
        "shared": torch.ones(1, 3),
        "scale": torch.tensor(2.0),
        "name": "x",
    }
    first, second = split(batch, 2)
    assert first["a"][0].tolist() == [0, 1] and second["a"][0].tolist() == [2, 3, 4]
    assert first["shared"].shape == (1, 3) and first["name"] == "x" and second["a"][1][0].shape == (3, 2)


def test_a_batch_that_cannot_be_split_is_told_with_its_shapes() -> None:
    with pytest.raises(Mistake, match=r"\(4,\), \(3,\)"):
        split((torch.zeros(4), torch.zeros(3)), 2)
    with pytest.raises(Mistake, match="5 pieces of a batch of 4"):
        split(torch.zeros(4), 5)
