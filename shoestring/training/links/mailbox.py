"""A mailbox: messages from one worker to a neighbour on the same machine, through memory that both see.

    the sender      copies a message into the room that is free, and then writes it down in the table
    the receiver    looks at the table until its message is there, copies it out, and strikes it off

Gloo moves a message only when its own threads get a core, and where every core computes that takes some milliseconds: a twentieth of a
small step, measured. What finds no room is written down as sent by gloo, so that nobody ever waits to send.
"""

from __future__ import annotations

from ctypes import memmove
from typing import Any

import numpy as np
from torch import Tensor

from shoestring.core.errors import Mistake

ROOM = 4 << 20  # bytes of messages
ENTRIES = 512  # messages that may be written down at once
NUMBER, TAG, BEGIN, SIZE = range(4)  # of an entry. Number: which message it is, from 1 on; 0: the entry is free
BY_GLOO = -1  # where a message begins that lies elsewhere
TABLE = ENTRIES * 4 * 8
BYTES = TABLE + ROOM

Numbers = np.ndarray[Any, Any]


class Mailbox:
    """One direction. Only the sender fills entries, only the receiver frees them."""

    def __init__(self, memory: Numbers) -> None:
        memory = np.asarray(memory)  # of a file or not
        self.table = memory[:TABLE].view(np.int64).reshape(ENTRIES, 4)
        self.room = memory[TABLE:]
        self.count = 0  # messages so far

    def put(self, message: Tensor, tag: int) -> str:
        """Gives what carries it: "memory", or "gloo" for want of room; nothing if not even that could be written down."""
        free = np.flatnonzero(self.table[:, NUMBER] == 0)
        if not len(free):
            return ""
        begin = self.gap(message.nbytes)
        if begin != BY_GLOO:
            memmove(self.room[begin:].ctypes.data, message.data_ptr(), message.nbytes)
        self.count += 1
        entry = self.table[free[0]]
        entry[TAG:] = tag, begin, message.nbytes
        entry[NUMBER] = self.count  # last: from now on it is there
        return "memory" if begin != BY_GLOO else "gloo"

    def gap(self, size: int) -> int:
        """Where as much room is free."""
        begin = 0
        taken = self.table[self.table[:, NUMBER] > 0, BEGIN:].tolist()
        for there, bytes_ in sorted(one for one in taken if one[0] != BY_GLOO):
            if there - begin >= size:
                break
            begin = there + bytes_
        return begin if begin + size <= len(self.room) else BY_GLOO

    def take(self, message: Tensor, tag: int) -> str:
        """The oldest message with this tag; gives what carries it, nothing if it is not there yet."""
        found = np.flatnonzero((self.table[:, NUMBER] > 0) & (self.table[:, TAG] == tag))
        if not len(found):
            return ""
        entry = self.table[min(found, key=lambda one: self.table[one, NUMBER])]
        begin, size = int(entry[BEGIN]), int(entry[SIZE])
        if size != message.nbytes:
            raise Mistake(
                f"a message of {size} bytes came where {message.nbytes} were awaited: what a model that is cut into stages gives "
                f"on must not have a size that only one worker knows"
            )
        if begin != BY_GLOO:
            memmove(message.data_ptr(), self.room[begin:].ctypes.data, size)
        entry[NUMBER] = 0  # last: from now on its room is free
        return "memory" if begin != BY_GLOO else "gloo"
