"""What can be told about a job's data from the object alone: nothing is fetched and nothing is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from shoestring.core.errors import Mistake
from shoestring.core.user_code.data_objects import generators_in, has_state

CALLS_USER = "data"  # core/user_code/seams.py

EXACT_SAMPLERS = (RandomSampler, SequentialSampler)  # torch's own: their length is reliable


def is_listed(data: Any) -> bool:
    """Whether data are a list of batches, so that any of them can be taken at once."""
    return isinstance(data, (list, tuple))


def is_mapped(data: Any) -> bool:
    """Whether data are a map-style data set: samples by number, to make batches from."""
    if isinstance(data, Mapping):
        names = ", ".join(map(repr, list(data)[:5]))
        raise Mistake(
            f"the job's data are a {type(data).__name__} by name ({names}): give one of them"
            f", such as data=lambda: data[{names.split(',')[0]}]"
        )
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_listed(data) and not has_state(data)


def stated_length(data: Any) -> int:
    """Batches per round, by the data's own length; 0: they do not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return 0


def counts_right(data: Any) -> bool:
    """Whether the data's length is reliable: that of a DataLoader with torch's own samplers. Others may be wrong."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    return type(data.batch_sampler) in (BatchSampler, type(None)) and type(data.sampler) in EXACT_SAMPLERS


def loading_processes(data: Any) -> tuple[int, int]:
    """Processes that the job's own DataLoader starts, and batches that they load ahead."""
    return (
        (data.num_workers, data.num_workers * (data.prefetch_factor or 0)) if isinstance(data, DataLoader) else (0, 0)
    )


def begin_epoch(data: Any, epoch: int) -> None:
    """Tell data, and the samplers that they use, which epoch begins, if they have `set_epoch`."""
    told: list[int] = []
    one: Any
    for one in (
        data,
        getattr(data, "dataset", None),
        getattr(data, "sampler", None),
        getattr(data, "batch_sampler", None),
    ):
        if callable(getattr(one, "set_epoch", None)) and id(one) not in told:
            told.append(id(one))
            one.set_epoch(epoch)


def can_be_shared(data: Any) -> bool:
    """Whether iterating over data changes nothing in them, so that several feeds can use one object: false for
    iterators, for data with a state, an epoch or a generator of their own, and for objects of user classes, which may
    do anything."""
    if isinstance(data, Iterator) or has_state(data) or generators_in(data):
        return False
    parts = (data, getattr(data, "dataset", None), getattr(data, "sampler", None), getattr(data, "batch_sampler", None))
    if any(hasattr(one, "set_epoch") for one in parts):
        return False
    return is_listed(data) or is_mapped(data) or (counts_right(data) and not data.persistent_workers)
