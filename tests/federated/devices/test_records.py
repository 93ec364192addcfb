"""A device's records: cached batches equal those read from the data set."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.federated.devices.records import Records, records_of
from tests.federated.toys import records, toy, toy_job


class Drawing(Dataset[Any]):
    """Samples that are augmented: another one every time."""

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.calls += 1
        noise = {"torch": lambda: float(torch.rand(())), "python": random.random, "own": lambda: self.calls / 100}[
            self.how
        ]()
        return torch.full((6,), number + noise), number % 3


def of(data: Any, **local: Any) -> Records:
    return records_of(toy_job(local=Local(**local)), "a", data, 3)


@pytest.mark.parametrize("how", ["torch", "python", "own"])
def test_augmented_samples_are_made_anew_for_every_batch(how: str) -> None:
    found = of(Drawing(how))
    assert found.whole is None
    first, second = (found.batch(torch.tensor([1, 2]))[0] for _ in range(2))
    assert not torch.equal(first, second), "a second look is another sample"
    given = toy(toy_job(clients=lambda: {"a": Drawing(how)}), how=None, per_round=1)
    assert given.how.kind == "sequential"


def test_what_stacks_is_kept_and_is_what_the_samples_are() -> None:
    data = records(4, 9)
    tensors = TensorDataset(*(torch.stack(one) for one in zip(*data, strict=True)))
    for some in (data, tensors, Subset(tensors, list(range(9)))):
        found = of(some)
        assert found.whole is not None
        inputs, targets = found.batch(torch.tensor([5, 0]))
        assert torch.equal(inputs, torch.stack([data[5][0], data[0][0]])) and targets.tolist() == [
            int(data[5][1]),
            int(data[0][1]),
        ]


def test_lengths_that_vary_are_left_to_the_jobs_collate() -> None:
    assert of([(torch.zeros(number + 1), 0) for number in range(4)]).whole is None


@pytest.mark.parametrize(("count", "share", "aside"), [(10, 0.2, 2), (1, 0.5, 0), (3, 0.9, 2), (7, 0.0, 0)])
def test_what_is_held_out_is_never_trained_on_and_something_is_always_left(
    count: int, share: float, aside: int
) -> None:
    found = of(records(1, count), held_out=share)
    assert len(found.held_out) == aside and found.count == count - aside
    assert sorted([*found.trained.tolist(), *found.held_out.tolist()]) == list(range(count))


@pytest.mark.parametrize(
    ("data", "why"),
    [([], "has no records"), ({"a": 1}, "are a dict"), (iter([1]), "are a list_iterator"), (7, "are a int")],
)
def test_what_is_no_data_set_is_refused_by_the_clients_name(data: Any, why: str) -> None:
    with pytest.raises(Mistake, match=f"the client 'a' can't be used, .* {why}"):
        of(data)
