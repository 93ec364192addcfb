"""Batches of a map-style data set: its samples, fetched and collated, here or ahead of time by processes of torch's
DataLoader.

Random numbers drawn on the way (augmentation, by torch, NumPy or Python) are determined by the seed, the batch's number
and the part of it, so a batch has the same bits whoever fetches it, and whatever was fetched before.

    processes    are forked, so that a data set may be anything (lambdas too); before the model is made, so that they share none of it.
                 They end with the feed, and with the process that they belong to.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake, error_sentence
from shoestring.core.running import random_state
from shoestring.core.running.random_state import RandomStream
from shoestring.core.user_code.blame import blame_for
from shoestring.data.kinds import begin_epoch

CALLS_USER = "data"  # core/user_code/seams.py

AHEAD = 2  # batches that every process fetches ahead
OF_SAMPLES = "a list beside collate= is one of samples: if these are ready batches, leave collate out, or give a function that yields them"


class BatchRequest(NamedTuple):
    """A part of a batch, by the numbers of its samples."""

    number: int  # of the batch
    part: int
    epoch: int
    samples: list[int]


@dataclass(frozen=True)
class FetchFailure:
    """An error in a fetching process, as text: an exception would arrive without its line."""

    text: str


class SampleDataset(Dataset[Any]):
    """A data set whose items are parts of batches."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Batch] | None, seed: int) -> None:
        self.data, self.collate, self.seed = data, default_collate if collate is None else collate, seed
        self.epoch: int | None = None  # the last epoch that the data were told

    def __getitem__(self, wanted: BatchRequest) -> Batch | FetchFailure:
        """Called in a fetching process."""
        try:
            random_state.seed(self.seed_of(wanted))
            return self.make_batch(wanted)
        except Exception as error:
            place = blame_for(error).place
            return FetchFailure(
                str(error) if isinstance(error, Mistake) else f"the job failed in {place}: {error_sentence(error)}"
            )

    def fetch(self, wanted: BatchRequest) -> Batch:
        """Called in this process."""
        with RandomStream(self.seed_of(wanted)).drawing():
            return self.make_batch(wanted)

    def make_batch(self, wanted: BatchRequest) -> Batch:
        if wanted.epoch != self.epoch:
            begin_epoch(self.data, wanted.epoch)
            self.epoch = wanted.epoch
        at_once = getattr(
            self.data, "__getitems__", None
        )  # as torch's own loader does: some data sets are faster when all samples are requested at once
        try:
            return self.collate(
                at_once(wanted.samples) if at_once else [self.data[sample] for sample in wanted.samples]
            )
        except StopIteration as error:  # it would look like the end of the data
            raise Mistake(
                f"the job's data set raised StopIteration for a sample, and says that it has {len(self.data)}: a data set gives "
                f"every sample below its length"
            ) from error
        except Exception as error:
            if not isinstance(self.data, (list, tuple)):
                raise
            kind = type(self.data[wanted.samples[0]]).__name__
            raise Mistake(
                f"collate fails on elements of a list of the job's data, each a {kind}, in {blame_for(error).place}: "
                f"{error_sentence(error)}; {OF_SAMPLES}; if they are samples, correct collate"
            ) from error

    def seed_of(self, wanted: BatchRequest) -> int:
        return hash((self.seed, wanted.number, wanted.part)) % 2**32


class Fetchers:
    """Processes that fetch parts of batches ahead, in the order in which they will be needed."""

    def __init__(self, samples: SampleDataset, count: int) -> None:
        self.order: Iterator[BatchRequest] = iter(())
        self.loader: DataLoader[Any] | None = DataLoader(
            samples,
            batch_size=None,
            sampler=self,
            num_workers=count,
            prefetch_factor=AHEAD,
            collate_fn=as_it_is,
            persistent_workers=True,
            multiprocessing_context="fork",
            generator=torch.Generator(),
            worker_init_fn=end_with_parent,
        )
        for _ in self.loader:  # nothing is requested yet: this starts the processes
            pass
        self.batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.order

    def begin(self, order: Iterator[BatchRequest]) -> None:
        """Fetch these from now on, in this order."""
        assert self.loader is not None, "they have not ended"
        self.order = order
        self.batches = iter(self.loader)

    def next(self) -> Batch:
        batch = next(self.batches)
        if isinstance(batch, FetchFailure):
            raise Mistake(batch.text)
        return batch

    def close(self) -> None:
        """End the processes."""
        self.batches, self.loader = iter(()), None


def as_it_is(batch: Any) -> Any:
    return batch


def end_with_parent(number: int) -> None:
    """In a fetching process: end when its parent process does, however that ends."""
    assert get_worker_info() is not None, "called in a fetching process"
    bind_to_parent()


def bind_to_parent() -> None:
    """End when the parent process does. Stop signals from a terminal or a launcher are for the parent, so they are
    ignored here."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
