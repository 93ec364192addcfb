"""Data that are read batch by batch in rounds: an epoch is one round.

    can be iterated again    starts over. Data that have `set_epoch` are told the epoch
    an iterator              ends, unless the job asks for several epochs: then its factory is called again

If epochs are counted, and the data's length is unknown or unreliable, the batch after the last one is fetched to know
whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoestring.core.batch import Batch
from shoestring.core.running import random_state
from shoestring.core.user_code.data_objects import has_state
from shoestring.data.kinds import begin_epoch, counts_right, stated_length

CALLS_USER = "data"  # core/user_code/seams.py

END = object()  # marks the end of a round


@dataclass(frozen=True)
class FetchedAhead:
    """A batch that was fetched early, and the states before that."""

    batch: Any  # END: there is none
    chance: Any  # state of the random stream
    data: Any  # state of the data, if they have one


class Rounds:
    """Batches, round after round. The caller activates the data's random stream."""

    def __init__(self, data: Any, factory: Callable[[], Any], epochs: int, counted: bool) -> None:
        """`epochs`: how many the job asks for; `counted`: whether the end of a round must be known."""
        self.data, self.factory, self.epochs_asked = data, factory, epochs
        self.stateful = has_state(data)
        self.length = stated_length(
            data
        )  # batches per round, by the data's length while that was never wrong; 0: unknown
        self.looks_ahead = counted and not counts_right(data) and not (self.stateful and self.length)
        self.source: Iterator[Any] | None = None
        self.ahead: FetchedAhead | None = None
        self.epoch = self.in_round = 0  # rounds over when the last batch was returned; batches returned in this round
        self.round_over = False  # whether that batch was the last of its round
        self.ended = False  # whether there are no more

    def next(self) -> Batch:
        """The next batch, of this round or the next. Raises StopIteration if there are no more."""
        if self.source is None:
            self.begin()
        batch = self.next_batch()
        if batch is END:
            batch = self.first_of_next()
        self.in_round += 1
        if self.looks_ahead:
            assert self.source is not None, "a round has begun"
            before = random_state.state(), self.data.state_dict() if self.stateful else None
            self.ahead = FetchedAhead(next(self.source, END), *before)
            self.round_over = self.ahead.batch is END
        else:
            self.length = self.length if self.in_round <= self.length else 0  # longer than the data said
            self.round_over = self.in_round == self.length
        return batch

    def next_batch(self) -> Any:
        assert self.source is not None, "a round has begun"
        if self.ahead is None:
            return next(self.source, END)
        batch, self.ahead = self.ahead.batch, None
        return batch

    def begin(self) -> None:
        begin_epoch(self.data, self.epoch)
        self.source = iter(self.data)

    def first_of_next(self) -> Batch:
        """The first batch of the next round. Raises StopIteration if there is no such round, or it is empty."""
        batch: Any = END
        if self.in_round and (self.source is not self.data or self.epoch + 1 < self.epochs_asked):
            if self.source is self.data:  # an iterator
                self.data = self.factory()
            if self.in_round != self.length and not self.looks_ahead:  # shorter than the data said
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
        """The state of data that have one, after the last batch that was returned."""
        return None if not self.stateful else self.data.state_dict() if self.ahead is None else self.ahead.data

    def load(self, state: Any, round: tuple[int, int, bool]) -> None:
        """Resume from a state of the data, in this round: (its number, batches returned in it, whether that was its
        last)."""
        self.epoch, self.in_round, self.round_over = round
        begin_epoch(self.data, self.epoch)
        self.data.load_state_dict(state)
        if self.epoch or self.in_round:  # numbers drawn at its begin were drawn before the state was saved
            self.source = iter(self.data)
