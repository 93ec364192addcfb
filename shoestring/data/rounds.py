"""Data that are gone through batch by batch, again and again: an epoch is one round of them.

    can be gone through again    they go round. One that wants to know which round it is (`set_epoch`) is told
    an iterator                  ends, unless the job asks for several epochs: then its factory is called again

Where somebody counts epochs, and the data do not say how many batches they have, or are not sure to be right, the batch after the last
one is fetched to know whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoestring.core import random_state
from shoestring.core.batch import Batch
from shoestring.core.given import has_state
from shoestring.data.kinds import begin_epoch, counts_right, said_length

CALLS_USER = "data"  # core/seams.py

END = object()  # where a round has no more


@dataclass(frozen=True)
class Ahead:
    """A batch that was fetched before it is wanted, and how the data stood before that."""

    batch: Any  # END: there is none
    chance: Any  # state of the random stream
    data: Any  # state of the data, if they have one


class Rounds:
    """Batches, round after round. Whoever calls has the random stream of the data drawing."""

    def __init__(self, data: Any, factory: Callable[[], Any], epochs: int, counted: bool) -> None:
        """`epochs`: the job asks for so many; `counted`: somebody must know where a round ends."""
        self.data, self.factory, self.epochs_asked = data, factory, epochs
        self.stateful = has_state(data)
        self.length = said_length(
            data
        )  # batches of a round, as far as the data say and it was never wrong; 0: nobody knows
        self.looks_ahead = counted and not counts_right(data) and not (self.stateful and self.length)
        self.source: Iterator[Any] | None = None
        self.ahead: Ahead | None = None
        self.epoch = self.in_round = 0  # rounds that were over when the last batch was given; batches given in this one
        self.round_over = False  # that batch was the last of its round
        self.ended = False  # there are no more

    def next(self) -> Batch:
        """The next batch, of this round or of the next one. Raises StopIteration where there are no more."""
        if self.source is None:
            self.begin()
        batch = self.taken()
        if batch is END:
            batch = self.first_of_next()
        self.in_round += 1
        if self.looks_ahead:
            assert self.source is not None, "a round has begun"
            before = random_state.state(), self.data.state_dict() if self.stateful else None
            self.ahead = Ahead(next(self.source, END), *before)
            self.round_over = self.ahead.batch is END
        else:
            self.length = self.length if self.in_round <= self.length else 0  # there are more than they said
            self.round_over = self.in_round == self.length
        return batch

    def taken(self) -> Any:
        assert self.source is not None, "a round has begun"
        if self.ahead is None:
            return next(self.source, END)
        batch, self.ahead = self.ahead.batch, None
        return batch

    def begin(self) -> None:
        begin_epoch(self.data, self.epoch)
        self.source = iter(self.data)

    def first_of_next(self) -> Batch:
        """The first batch of the next round. Raises StopIteration if there is no such round, or nothing in it."""
        batch: Any = END
        if self.in_round and (self.source is not self.data or self.epoch + 1 < self.epochs_asked):
            if self.source is self.data:  # an iterator
                self.data = self.factory()
            if self.in_round != self.length and not self.looks_ahead:  # fewer than they said
                self.length = 0
            begin_epoch(self.data, self.epoch + 1)
            self.source = iter(self.data)
            batch = next(self.source, END)
        if batch is END:
            self.ended, self.round_over = True, self.in_round > 0
            raise StopIteration
        self.epoch, self.in_round = self.epoch + 1, 0
        return batch

    def state(self) -> Any:
        """Of data that have one: as it is after the last batch that was given."""
        return None if not self.stateful else self.data.state_dict() if self.ahead is None else self.ahead.data

    def load(self, state: Any, round: tuple[int, int, bool]) -> None:
        """Go on from a state of the data, in this round: (its number, batches given in it, whether that was its last)."""
        self.epoch, self.in_round, self.round_over = round
        begin_epoch(self.data, self.epoch)
        self.data.load_state_dict(state)
        if self.epoch or self.in_round:  # what beginning draws was drawn before the state was taken
            self.source = iter(self.data)
