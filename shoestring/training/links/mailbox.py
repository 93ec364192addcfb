"""A mailbox: messages from one worker to a neighbour on the same machine, through shared memory.

    the sender      copies a message into free space, then adds it to the table
    the receiver    polls the table until its message is there, copies it out, and removes the entry

Gloo moves a message only when its own threads get a core; where every core computes that takes some milliseconds: a
twentieth of a small step, measured. A message that finds no space is entered in the table as sent by gloo, so that
nobody ever waits to send.
"""

from __future__ import annotations

from ctypes import memmove
from typing import Any

import numpy as np
from torch import Tensor

from shoestring.core.errors import Mistake

ROOM = 4 << 20  # bytes of messages
ENTRIES = 512  # most messages in the table at once
NUMBER, TAG, BEGIN, SIZE = range(4)  # of an entry. Number: counts messages from 1; 0: the entry is free
BY_GLOO = -1  # as BEGIN: gloo carries the message
TABLE = ENTRIES * 4 * 8
BYTES = TABLE + ROOM

Numbers = np.ndarray[Any, Any]


class Mailbox:
    """One direction. Only the sender fills entries, only the receiver frees them."""

    def __init__(self, memory: Numbers) -> None:
        memory = np.asarray(memory)  # drops the memmap subclass
        self.table = memory[:TABLE].view(np.int64).reshape(ENTRIES, 4)
        self.room = memory[TABLE:]
        self.count = 0  # messages sent so far

    def put(self, message: Tensor, tag: int) -> str:
        """Returns what carries the message: "memory", or "gloo" if space is lacking; "" if even the table is full."""
        free = np.flatnonzero(self.table[:, NUMBER] == 0)
        if not len(free):
            return ""
        begin = self.gap(message.nbytes)
        if begin != BY_GLOO:
            memmove(self.room[begin:].ctypes.data, message.data_ptr(), message.nbytes)
        self.count += 1
        entry = self.table[free[0]]
        entry[TAG:] = tag, begin, message.nbytes
        entry[NUMBER] = self.count  # last: this makes the entry visible
        return "memory" if begin != BY_GLOO else "gloo"

    def gap(self, size: int) -> int:
        """An offset with `size` free bytes."""
        begin = 0
        taken = self.table[self.table[:, NUMBER] > 0, BEGIN:].tolist()
        for there, bytes_ in sorted(one for one in taken if one[0] != BY_GLOO):
            if there - begin >= size:
                break
            begin = there + bytes_
        return begin if begin + size <= len(self.room) else BY_GLOO

    def take(self, message: Tensor, tag: int) -> str:
        """Receive the oldest message with this tag. Returns what carries it; "" if it is not there yet."""
        found = np.flatnonzero((self.table[:, NUMBER] > 0) & (self.table[:, TAG] == tag))
        if not len(found):
            return ""
        entry = self.table[min(found, key=lambda one: self.table[one, NUMBER])]
        begin, size = int(entry[BEGIN]), int(entry[SIZE])
        if size != message.nbytes:
            raise Mistake(
                f"a message of {size} bytes came where {message.nbytes} were expected: in a model that is cut into stages, the size "
                f"of values between stages must not depend on something that only one worker knows"
            )
        if begin != BY_GLOO:
            memmove(message.data_ptr(), self.room[begin:].ctypes.data, size)
        entry[NUMBER] = 0  # last: this frees its space
        return "memory" if begin != BY_GLOO else "gloo"
