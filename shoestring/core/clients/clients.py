"""Clients: devices' names and records, by name and by number, made when they are needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake

CALLS_USER = "clients"  # core/user_code/seams.py


class Clients(Mapping[str, Any]):
    """A mapping of names to records in a fixed order. It finds the n-th name without listing all names."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """The name of a client by its number, from 0."""

    @abstractmethod
    def number_of(self, name: str) -> int:
        """The number of a client by its name; raises KeyError if there is none."""

    @abstractmethod
    def records(self, number: int) -> Any:
        """The records of a client by its number."""

    def __getitem__(self, name: str) -> Any:
        return self.records(self.number_of(name))

    def __iter__(self) -> Iterator[str]:
        return map(self.name_of, range(len(self)))

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self.number_of(name) >= 0
        except KeyError:
            return False


@dataclass(frozen=True, eq=False)
class Numbered(Clients):
    """Clients named "0", "1", ... whose records are `make(number)`: a million of them cost nothing until they are used.

    Job(..., clients=lambda: Numbered(1_000_000, lambda number: records_of_user(number)))
    """

    count: int
    make: Callable[[int], Any]

    def __post_init__(self) -> None:
        if self.count < 1:
            raise Mistake(f"Numbered({self.count}, ...): a federated job needs clients; give 1 or more")

    def __len__(self) -> int:
        return self.count

    def name_of(self, number: int) -> str:
        return str(range(self.count)[number])

    def number_of(self, name: str) -> int:
        number = int(name) if name.isdecimal() and len(name) < 20 else self.count
        if number >= self.count or str(number) != name:
            raise KeyError(name)
        return number

    def records(self, number: int) -> Any:
        return self.make(number)


@dataclass(frozen=True, eq=False)
class Named(Clients):
    """Clients with names of their own, whose records are `make(number)`."""

    names: tuple[str, ...]
    make: Callable[[int], Any]

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def name_of(self, number: int) -> str:
        return self.names[number]

    def number_of(self, name: str) -> int:
        return self.numbers[name]

    def records(self, number: int) -> Any:
        return self.make(number)


@dataclass(frozen=True, eq=False)
class ClientSubset(Clients):
    """A few of many clients, under their original names."""

    everybody: Clients
    chosen: Tensor  # their numbers among the many, ascending

    def __len__(self) -> int:
        return len(self.chosen)

    def name_of(self, number: int) -> str:
        return self.everybody.name_of(int(self.chosen[number]))

    def number_of(self, name: str) -> int:
        wanted = self.everybody.number_of(name)
        place = int(torch.searchsorted(self.chosen, wanted))
        if place == len(self.chosen) or int(self.chosen[place]) != wanted:
            raise KeyError(name)
        return place

    def records(self, number: int) -> Any:
        return self.everybody.records(int(self.chosen[number]))
