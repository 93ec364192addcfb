"""Clients: devices' names and their records, by name and by number, made when they are asked for."""
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoestring.core.errors import Mistake


class Clients(Mapping[str, Any]):
    """A mapping of names to records, always in the same order. It knows the n-th name without a list of all of them."""

    @abstractmethod
    def name_of(self, number: int) -> str:
        """The name of a client by its number, from 0."""

    def __iter__(self) -> Iterator[str]:
        return map(self.name_of, range(len(self)))


@dataclass(frozen=True, eq=False)
class Numbered(Clients):
    """Clients with the names "0", "1", ... whose records are `make(number)`: a million of them cost nothing until they are asked for.

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

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self.make(int(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.isdecimal() and len(name) < 20 and str(int(name)) == name and int(name) < self.count


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

    def __getitem__(self, name: str) -> Any:
        return self.make(self.numbers[name])

    def __contains__(self, name: object) -> bool:
        return name in self.numbers
