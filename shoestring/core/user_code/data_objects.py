"""Data given to a Job as an object, in place of a factory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shoestring.core.errors import Mistake


class GivenData:
    """A factory for one object. Every call returns the data in the state they had when the Job was made, whoever has
    read them since: planning reads the first batches, and a resumed run must find them unread.

        with state_dict, load_state_dict    the object, reset to its first state
        a DataLoader                        a copy with its own generators, in their first state
        anything else                       the object
    """

    def __init__(self, value: Any, checked: bool = False) -> None:
        self.value, self.checked = value, checked  # checked: whether it can be iterated again (data/lengths.py)
        self.state = copy.deepcopy(value.state_dict()) if has_state(value) else None
        self.drawn = [(one, one.get_state()) for one in generators_in(value)]

    def __call__(self) -> Any:
        if self.state is not None:
            self.value.load_state_dict(copy.deepcopy(self.state))
            return self.value
        if not isinstance(self.value, DataLoader):
            return self.value
        fresh = {id(one): torch.Generator(one.device).set_state(state) for one, state in self.drawn}
        return copy_loader(self.value, fresh)

    def __reduce__(self) -> tuple[type[GivenData], tuple[Any, bool]]:
        """Pickles the object alone; pickle keeps the state of a generator."""
        return GivenData, (self.value, self.checked)


def factory_of(name: str, value: Any) -> Any:
    """A Job's data field as a factory. A data set that happens to be callable is still data."""
    if isinstance(value, GivenData) or (callable(value) and not isinstance(value, (Dataset, DataLoader))):
        return value
    if isinstance(value, Iterator):
        raise Mistake(
            f"{name} in the Job is a {type(value).__name__}, an iterator, which can be read only once; planning reads the "
            f"first batches too, and a resumed run starts from the first: give a list, a data set, a DataLoader, or a "
            f"function that makes the iterator, {name}=lambda: ..."
        )
    if not is_data(value):
        raise Mistake(
            f"{name} in the Job is a {type(value).__name__}: give batches (a list, a DataLoader), a data set, or a function that "
            f"makes them, {name}=lambda: ..."
        )
    return GivenData(value)


def is_data(value: Any) -> bool:
    """Whether an object could be a job's data: it can be iterated over, or has samples by number."""
    by_number = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return not isinstance(value, (str, bytes)) and (
        isinstance(value, Iterable) or by_number or hasattr(value, "__next__")
    )


def has_state(data: Any) -> bool:
    """Whether data can be restored to a position by their own state_dict."""
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def generators_in(data: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, each once."""
    sampler, batch_sampler = getattr(data, "sampler", None), getattr(data, "batch_sampler", None)
    found = (
        getattr(one, "generator", None)
        for one in (data, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    )
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def copy_loader(one: Any, generators: dict[int, torch.Generator]) -> Any:
    """A copy of a loader or sampler, with copies of its samplers, that draws from these generators instead."""
    same: dict[int, Any] = {}  # a loader's sampler may also be its batch sampler's

    def copy_of(thing: Any) -> Any:
        if id(thing) not in same:
            same[id(thing)] = new = copy.copy(thing)
            for name in ("sampler", "batch_sampler", "generator", "_iterator"):
                inside = vars(new).get(name) if hasattr(new, "__dict__") else None
                if name == "generator" and id(inside) in generators:
                    vars(new)[name] = generators[id(inside)]
                elif name == "_iterator" and inside is not None:
                    vars(new)[name] = None  # persistent worker processes: a copy starts its own
                elif inside is not None and name != "generator":
                    vars(new)[name] = copy_of(inside)
        return same[id(thing)]

    return copy_of(one)
