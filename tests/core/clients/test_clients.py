"""Clients are found by name and by number alike, and nobody is found who is not there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.clients.clients import Clients, ClientSubset, Named, Numbered
from shoestring.core.errors import Mistake


def check_mapping(clients: Clients, names: list[str]) -> None:
    assert len(clients) == len(names) and list(clients) == names
    for number, name in enumerate(names):
        assert name in clients and clients.number_of(name) == number and clients.name_of(number) == name
        assert clients[name] == clients.records(number)


@given(st.integers(1, 50), st.data())
def test_a_subset_has_the_records_of_the_many_under_their_names(count: int, data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    everybody = data.draw(
        st.sampled_from(
            (
                Numbered(count, lambda number: ("records", number)),
                Named(tuple(f"n{-one}" for one in range(count)), lambda number: number**2),
            )
        )
    )
    few = ClientSubset(everybody, torch.tensor(chosen, dtype=torch.int64))
    check_mapping(everybody, [everybody.name_of(number) for number in range(count)])
    check_mapping(few, [everybody.name_of(number) for number in chosen])
    assert dict(few) == {name: everybody[name] for name in few}
    for number in set(range(count)) - set(chosen):
        assert everybody.name_of(number) not in few
        with pytest.raises(KeyError):
            few.number_of(everybody.name_of(number))


def test_a_subset_of_a_subset_is_counted_within_it() -> None:
    few = ClientSubset(Numbered(10, lambda number: number), torch.tensor([1, 4, 7, 9]))
    check_mapping(ClientSubset(few, torch.tensor([0, 2, 3])), ["1", "7", "9"])


@pytest.mark.parametrize("name", ["10", "-1", "01", "+1", " 1", "1.0", "", "٣", "²", "1_0", "9" * 30, "one"])
def test_only_the_one_way_to_write_a_number_is_a_name(name: str) -> None:
    clients = Numbered(10, lambda number: number)
    assert name not in clients and 1 not in clients  # type: ignore[comparison-overlap]
    with pytest.raises(KeyError):
        clients[name]


def test_a_million_clients_are_made_when_they_are_used() -> None:
    made: list[int] = []
    clients = Numbered(1_000_000, lambda number: made.append(number) or number)
    assert clients["999999"] == 999_999 and "1000000" not in clients and made == [999_999]
    with pytest.raises(Mistake, match="give 1 or more"):
        Numbered(0, lambda number: number)
