"""The records of one device: they are read here, trained on and judged by, and never leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from shoestring.core import random_state
from shoestring.core.batch import Batch, leaves, mapped
from shoestring.core.job import Job
from shoestring.federated.device_errors import UnusableRecords
from shoestring.federated.seeds import generator_of

CALLS_USER = "clients"  # core/seams.py


@dataclass(frozen=True)
class Records:
    name: str  # of the device
    data: Any = field(repr=False)  # samples by number
    trained: Tensor = field(repr=False)  # numbers of the samples that it trains on,
    held_out: Tensor = field(repr=False)  # and of those that it is judged by
    collate: Callable[[list[Any]], Batch] | None = None
    # What was made of the records and is kept with them; other records, made of these by `replace`, have their own
    made_of: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        """Samples that it trains on."""
        return len(self.trained)

    @cached_property
    def whole(self) -> Batch | None:
        """All samples as one batch whose tensors have a row a sample; None where they do not stack (lengths vary), where the job's own
        collate makes batches (it may pad each to its longest), and where a sample is another one every time (it is augmented)."""
        if self.collate is not None:
            return None
        if (found := stacked_tensors(self.data)) is not None:
            return found
        with random_state.kept():
            before = drawn_so_far()
            try:
                found, again = self.made(range(len(self.data))), self.made(range(1))
            except (RuntimeError, TypeError, ValueError):
                return None
            if drawn_so_far() != before:
                return None
        rows = [len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else -1 for leaf in leaves(found)]
        stacks = bool(rows) and all(count == len(self.data) for count in rows)
        same = stacks and all(
            torch.equal(one[:1], other) for one, other in zip(leaves(found), leaves(again), strict=True)
        )
        return found if same else None

    def made(self, numbers: Sequence[int] | range) -> Batch:
        """A batch of samples, as the job makes them."""
        collate = default_collate if self.collate is None else self.collate
        return collate([self.data[number] for number in numbers])

    def batch(self, numbers: Tensor) -> Batch:
        """The same, out of `whole` where that is there."""
        whole = self.whole
        if whole is None:
            return self.made(numbers.tolist())
        return mapped(lambda leaf: leaf[numbers], whole)


def drawn_so_far() -> tuple[object, ...]:
    """Where the random generators stand."""
    state = random_state.state()
    kind, keys, *rest = state["numpy"]  # the rest: its place among the keys, and a normal number that waits
    return state["python"], kind, keys.tobytes(), *rest, bytes(state["torch"].numpy())


def stacked_tensors(data: Any) -> Batch | None:
    """The samples of torch's own data sets of tensors, without going through them one by one."""
    if type(data) is TensorDataset:
        return list(data.tensors)
    if type(data) is Subset and (inside := stacked_tensors(data.dataset)) is not None:
        numbers = torch.as_tensor(data.indices)
        return [tensor[numbers] for tensor in inside]
    return None


def records_of(job: Job, name: str, data: Any, seed: int) -> Records:
    """A device's records, divided into what it trains on and what it is judged by; that follows from the seed and its name."""
    if isinstance(data, Mapping) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UnusableRecords(
            name,
            f"its records are a {type(data).__name__}",
            "give a data set or a list of samples, anything with a length and items by number",
        )
    count = len(data)
    if not count:
        raise UnusableRecords(name, "it has no records", "leave it out of the job's clients")
    aside = min(int(count * job.local.held_out), count - 1)
    order = torch.randperm(count, generator=generator_of(seed, "held out", name)) if aside else torch.arange(count)
    return Records(name, data, order[aside:].sort().values, order[:aside].sort().values, job.collate)
