"""Partition rules: every sample is one client's, all follows from the seed, and knobs do what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from shoestring import Job
from shoestring.core.clients.clients import Numbered
from shoestring.core.errors import Mistake
from shoestring.data.clients import clients_of
from shoestring.data.columns import classes_of, column_of
from shoestring.data.partition import ByColumn, Dirichlet, Iid, QuantitySkew, mix

RULES = (
    Iid(),
    Dirichlet(0.3),
    Dirichlet(0.05),
    Dirichlet(1e-6),
    Dirichlet(2.0, by="class"),
    QuantitySkew(0.2),
    QuantitySkew(1e-6),
)


def labelled(count: int, classes: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.arange(count) * 7 % classes)


def numbers(clients: Mapping[str, Any]) -> list[list[int]]:
    return [[int(sample[0]) for sample in records] for records in clients.values()]


def job(**settings: Any) -> Job:
    return Job(**{"model": nn.Identity, "data": lambda: labelled(200)} | settings)


class Letters(Dataset[Any]):
    """Samples that are mappings."""

    def __init__(self) -> None:
        self.fetched = 0

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.fetched += 1
        return {"text": number, "author": ["ada", "bob", "cleo"][number % 3 if number < 6 else 0]}


class OffloadModel(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1, 2])

    def __len__(self) -> int:
        return 2


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    samples=st.integers(1, 300),
    part=st.floats(0, 1),
    classes=st.integers(1, 12),
    seed=st.integers(0, 2**62),
)
def test_every_sample_is_one_clients_and_follows_from_the_seed(
    rule: Any, samples: int, part: float, classes: int, seed: int
) -> None:
    data, count = labelled(samples, classes), max(1, round(part * samples))
    try:
        found = rule.clients(data, count, seed)
    except Mistake as mistake:  # only one rule may leave somebody with nothing, and it says so
        assert "by=" in str(mistake) and rule == Dirichlet(2.0, by="class")
        return
    owned = numbers(found)
    assert sorted(sample for records in owned for sample in records) == list(range(samples))
    assert len(found) == count and all(owned)
    assert list(found) == [str(number) for number in range(count)] == [found.name_of(number) for number in range(count)]
    assert owned == numbers(rule.clients(data, count, seed))
    if isinstance(rule, Iid) or (isinstance(rule, Dirichlet) and rule.by == "client"):
        assert {len(records) for records in owned} <= {samples // count, -(-samples // count)}


@pytest.mark.parametrize("rule", RULES[:6], ids=str)
def test_another_seed_divides_otherwise(rule: Any) -> None:
    assert numbers(rule.clients(labelled(200), 10, 1)) != numbers(rule.clients(labelled(200), 10, 2))


def distance(rule: Any, seed: int) -> float:
    """Mean distance (total variation) of clients' mixes of classes from that of all samples."""
    found = rule.clients(labelled(4000), 40, seed)
    mixes = [
        torch.bincount(torch.tensor([int(label) for _, label in records]), minlength=10) / len(records)
        for records in found.values()
    ]
    return sum(float((one - 0.1).abs().sum()) / 2 for one in mixes) / len(mixes)


@pytest.mark.parametrize("by", ["client", "class"])
def test_mixes_differ_more_the_lower_alpha_is(by: str) -> None:
    for seed in range(3):
        found = [distance(Dirichlet(alpha, by=by), seed) for alpha in (100.0, 3.0, 0.5, 0.2)]
        assert found == sorted(found) and found[0] < 0.16 and found[-1] > 0.5
        assert abs(distance(Dirichlet(1e6), seed) - distance(Iid(), seed)) < 0.05


def test_sizes_differ_more_the_lower_alpha_is() -> None:
    for seed in range(5):
        largest = [
            max(map(len, numbers(QuantitySkew(alpha).clients(labelled(1000), 20, seed))))
            for alpha in (1000.0, 3.0, 0.1)
        ]
        assert largest == sorted(largest) and largest[0] < 60 and largest[-1] > 200


def test_shares_have_the_mean_and_the_variance_of_a_dirichlet_distribution() -> None:
    import random

    drawn, alphas = random.Random(0), [0.05, 0.5, 2.0]
    found = torch.tensor([mix(alphas, drawn) for _ in range(4000)], dtype=torch.float64)
    mean = torch.tensor(alphas, dtype=torch.float64) / sum(alphas)
    assert torch.allclose(found.sum(1), torch.ones(4000, dtype=torch.float64))
    assert torch.allclose(found.mean(0), mean, atol=0.012)
    assert torch.allclose(found.var(0), mean * (1 - mean) / (1 + sum(alphas)), atol=0.005)


def test_the_rule_of_hsu_keeps_the_shares_of_unequal_classes() -> None:
    """A class of a tenth of the samples is about a tenth of a client's, by the prior, though alpha is large."""
    labels = (torch.arange(4000) % 10 == 0).long()
    found = Dirichlet(1000.0).clients(TensorDataset(torch.arange(4000), labels), 20, 0)
    shares = [sum(int(label) for _, label in records) / len(records) for records in found.values()]
    assert all(0.04 < share < 0.17 for share in shares)


def test_a_column_names_the_clients_in_the_order_of_its_values() -> None:
    found = ByColumn("author").clients(Letters(), 100, 0)
    texts = {name: [one["text"] for one in records] for name, records in found.items()}
    assert texts == {"ada": [0, 3, 6, 7, 8], "bob": [1, 4], "cleo": [2, 5]}
    assert list(found) == ["ada", "bob", "cleo"] == [found.name_of(number) for number in range(3)]
    by_label = ByColumn(1).clients(labelled(20, 3), 1, 0)
    assert set(by_label) == {"0", "1", "2"} and all(
        {int(label) for _, label in by_label[name]} == {int(name)} for name in by_label
    )


class WithTargets(Letters):
    targets = [0, 1, 2] * 3
    columns = {"author": ["eve"] * 9}


def test_a_column_is_read_without_fetching_samples_where_the_data_have_it() -> None:
    data = WithTargets()
    assert column_of(data, 1) == data.targets and column_of(Subset(data, [5, 1]), "author") == ["eve", "eve"]
    assert column_of(Subset(labelled(9), [3, 1]), 1) == [1, 7] and data.fetched == 0
    assert column_of(data, "text") == list(range(9)) and data.fetched == 9
    assert classes_of(TensorDataset(torch.arange(4), torch.tensor([5.0, -1.0, 5.0, 9.0])), 1).tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Iid().clients(labelled(5), 7, 0),
            "7 clients .*5 samples: 2 would have too few; give 5 clients or fewer",
        ),
        (
            lambda: QuantitySkew(1.0, least=3).clients(labelled(10), 4, 0),
            "4 clients of 3 samples or more .* give 3 clients",
        ),
        (
            lambda: Dirichlet(0.01, by="class").clients(labelled(100), 50, 0),
            r"leaves at least \d+ of 50 clients .*fewer clients, a larger",
        ),
        (lambda: Dirichlet(0), "alpha=0.*above 0"),
        (lambda: Dirichlet(float("nan")), "alpha=nan.*above 0"),
        (lambda: QuantitySkew(float("inf")), "alpha=inf.*above 0"),
        (lambda: Dirichlet(0.3, least=0), "least=0.*1 or more"),
        (lambda: Dirichlet(0.3, by="sample"), "by='sample'"),
        (lambda: Dirichlet(0.3, label=2).clients(labelled(5), 2, 0), "no column 2.*tuple of 2"),
        (
            lambda: Dirichlet(0.3).clients(TensorDataset(torch.arange(3), torch.rand(3)), 2, 0),
            "label is 0.* whole numbers or texts",
        ),
        (lambda: Dirichlet(0.3).clients(TensorDataset(torch.arange(3), torch.rand(3, 2)), 2, 0), r"shape \(3, 2\)"),
        (lambda: ByColumn("writer").clients(Letters(), 2, 0), "no column 'writer'.*'text', 'author'"),
        (lambda: ByColumn("text").clients([{"text": "a"}, {"text": None}], 2, 0), "sample 1 has None.*nobody's"),
        (lambda: Numbered(0, lambda number: [number]), "1 or more"),
        (lambda: clients_of(job(), None, 0), "has no clients.*Dirichlet"),
        (lambda: clients_of(job(clients=Iid), None, 0), r"the class Iid.*write clients=Iid\("),
        (lambda: clients_of(job(clients={"a": [1]}), None, 0), "a dict.*lambda"),
        (lambda: clients_of(job(clients=lambda: [1, 2]), None, 0), "gave a list.*mapping"),
        (lambda: clients_of(job(clients=dict), None, 0), "none"),
        (lambda: clients_of(job(clients=lambda: {1: [0], "1": [1]}), None, 0), "the name '1'"),
        (lambda: clients_of(job(clients=lambda: {"a": [0], "b": [1]}), 3, 0), "--clients 3, and the job has 2"),
        (lambda: clients_of(job(clients=Iid()), 0, 0), "--clients 0"),
        (lambda: clients_of(job(clients=Iid()), 201, 0), "201 clients"),
        (lambda: clients_of(job(clients=ByColumn(1)), 11, 0), "--clients 11, and the job has 10"),
        (lambda: clients_of(job(clients=Iid(), data=lambda: iter([1])), None, 0), "a list_iterator.*map-style"),
        (
            lambda: clients_of(job(clients=Iid(), data=lambda: [(1, 2)]), None, 0),
            "are a list.*batches.*add collate=.*map-style",
        ),
        (lambda: clients_of(job(clients=Iid(), data=OffloadModel), None, 0), "OffloadModel.*map-style"),
        (lambda: clients_of(job(clients=Iid(), data=lambda: labelled(0)), None, 0), "no samples"),
    ],
)
def test_what_cant_be_divided_is_refused_with_the_reason(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(Mistake, match=words):
        make()


def test_the_clients_of_a_job_are_its_own_or_those_of_its_rule() -> None:
    assert len(clients_of(job(clients=Iid()), None, 0)) == 100 and len(clients_of(job(clients=Iid()), 7, 0)) == 7
    assert len(clients_of(job(clients=Iid(), data=lambda: labelled(30)), None, 0)) == 30
    assert list(clients_of(job(clients=ByColumn(1)), None, 0)) == list("0741852963")
    own = clients_of(job(clients=lambda: {"b": [1], "a": [2, 3], 7: [4]}), None, 0)
    assert dict(own) == {"b": [1], "a": [2, 3], "7": [4]} and own.name_of(1) == "a"


def test_fewer_clients_than_there_are_are_drawn_from_the_seed() -> None:
    def drawn(count: int, seed: int) -> list[str]:
        return list(clients_of(job(clients=lambda: Numbered(50, lambda number: [number])), count, seed))

    assert drawn(10, 1) == drawn(10, 1) != drawn(10, 2) and len(set(drawn(10, 1))) == 10
    assert set(drawn(5, 3)) < set(drawn(20, 3)), "more clients are the same ones and others"
    assert clients_of(job(clients=lambda: Numbered(50, lambda number: [number])), 9, 0)[drawn(9, 0)[4]] == [
        int(drawn(9, 0)[4])
    ]


def test_some_clients_are_a_mapping_of_those_alone() -> None:
    found = clients_of(job(clients=lambda: {name: [name] for name in "abcdefgh"}), 3, 0)
    chosen = list(found)
    assert len(chosen) == 3 and dict(found) == {name: [name] for name in chosen}
    assert [name for name in "abcdefgh" if name in found] == chosen and "z" not in found
    for other in sorted(set("abcdefghz") - set(chosen)):
        with pytest.raises(KeyError):
            found[other]


def test_a_million_numbered_clients_are_made_one_at_a_time() -> None:
    made: list[int] = []

    def records(number: int) -> list[int]:
        made.append(number)
        return [number]

    found = clients_of(job(clients=lambda: Numbered(1_000_000, records)), None, 0)
    assert (
        len(found) == 1_000_000
        and found.name_of(999_999) == "999999"
        and found["123456"] == [123456]
        and made == [123456]
    )
    assert (
        "1000000" not in found
        and "007" not in found
        and "-1" not in found
        and "x" not in found
        and "²" not in found
        and 3 not in found
    )
    with pytest.raises(KeyError):
        found["1000000"]
    with pytest.raises(IndexError):
        found.name_of(1_000_000)


def test_a_list_beside_collate_contains_samples_which_a_rule_divides() -> None:
    samples = [(torch.full((2,), float(number)), number % 3) for number in range(12)]
    found = clients_of(job(clients=Iid(), data=lambda: samples, collate=default_collate), 4, 0)
    records = [float(one[0][0]) for name in found for one in found[name]]
    assert len(found) == 4 and sorted(records) == [float(number) for number in range(12)]


class Proxy:
    """A callable whose every attribute raises, as a proxy to a service may."""

    def __call__(self) -> dict[str, list[int]]:
        return {"a": [1, 2]}

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no connection for {name}")


def test_a_function_object_whose_attributes_raise_gives_clients() -> None:
    assert list(clients_of(job(clients=Proxy()), None, 0)) == ["a"]
