"""The records of one device: a training part and a held-out part. They never leave the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from shoestring.core.batch import Batch, leaves, map_leaves
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.federated.devices.device_errors import UnusableRecords
from shoestring.federated.playing.seeds import generator_of

CALLS_USER = "clients"  # core/user_code/seams.py


@dataclass(frozen=True)
class Records:
    name: str  # of the device
    data: Any = field(repr=False)  # a data set: samples by index
    trained: Tensor = field(repr=False)  # indices of the training samples
    held_out: Tensor = field(repr=False)  # indices of the samples held out for evaluation
    collate: Callable[[list[Any]], Batch] | None = None
    # Tensors derived from the records, kept for the next round. `replace` makes records with an empty cache
    cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        """Number of training samples."""
        return len(self.trained)

    @cached_property
    def whole(self) -> Batch | None:
        """All samples stacked into one batch, a row per sample. None if they can't be stacked (lengths vary), if the
        job has its own collate (it may pad each batch to its longest sample), or if samples change with every access
        (augmentation)."""
        if self.collate is not None:
            return None
        if (found := stacked_tensors(self.data)) is not None:
            return found
        with random_state.fork_rng():
            before = generator_states()
            try:
                found, again = self.make_batch(range(len(self.data))), self.make_batch(range(1))
            except (RuntimeError, TypeError, ValueError):
                return None
            if generator_states() != before:
                return None
        rows = [len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else -1 for leaf in leaves(found)]
        stacks = bool(rows) and all(count == len(self.data) for count in rows)
        same = stacks and all(
            torch.equal(one[:1], other) for one, other in zip(leaves(found), leaves(again), strict=True)
        )
        return found if same else None

    def make_batch(self, numbers: Sequence[int] | range) -> Batch:
        """A batch made of single samples by the job's collate function."""
        collate = default_collate if self.collate is None else self.collate
        return collate([self.data[number] for number in numbers])

    def batch(self, numbers: Tensor) -> Batch:
        """A batch of the samples with these indices, sliced out of `whole` where that exists."""
        whole = self.whole
        if whole is None:
            return self.make_batch(numbers.tolist())
        return map_leaves(lambda leaf: leaf[numbers], whole)


def generator_states() -> tuple[object, ...]:
    """The state of Python's, NumPy's and torch's random generators; it changes when somebody draws a number."""
    state = random_state.state()
    kind, keys, *rest = state["numpy"]  # the rest: position among the keys, and a cached normal number
    return state["python"], kind, keys.tobytes(), *rest, bytes(state["torch"].numpy())


def stacked_tensors(data: Any) -> Batch | None:
    """The tensors of a TensorDataset or a Subset of one, without reading sample by sample; None for other data sets."""
    if type(data) is TensorDataset:
        return list(data.tensors)
    if type(data) is Subset and (inside := stacked_tensors(data.dataset)) is not None:
        numbers = torch.as_tensor(data.indices)
        return [tensor[numbers] for tensor in inside]
    return None


def records_of(job: Job, name: str, data: Any, seed: int) -> Records:
    """Split a device's data into training and held-out samples. The split follows from the seed and the device's name
    alone."""
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
