"""The front's end of a replica: one batch goes out, one reply comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoestring.serving.batching.queue import QueuedBatch
from shoestring.serving.replicas.wire import (
    PREFIX,
    BatchReply,
    BrokenFrame,
    batch_frame,
    lengths_in,
    read_header,
    read_reply,
)

if TYPE_CHECKING:
    from shoestring.serving.replicas.generation import Generation


class LineOwner(Protocol):
    """Who is told what a replica does."""

    def on_ready(self, line: ReplicaLine) -> None: ...
    def on_reply(self, line: ReplicaLine, batch: QueuedBatch[Any], reply: BatchReply) -> None: ...
    def on_lost(self, line: ReplicaLine, batch: QueuedBatch[Any] | None) -> None: ...


class ReplicaLine(asyncio.BufferedProtocol):
    """It reads straight into the memory that the tensors keep."""

    def __init__(self, owner: LineOwner, home: Generation, hung_after: float) -> None:
        self.owner, self.home, self.hung_after = owner, home, hung_after
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.pid = 0  # 0: not ready yet
        self.batch: QueuedBatch[Any] | None = None
        self.free_at = 0.0  # when its batch is predicted to be done
        self.closing = False
        self.timer: asyncio.TimerHandle | None = None
        self.part, self.got = bytearray(PREFIX.size), 0
        self.next: Callable[[bytearray], None] = self.begin
        self.header: Any = None
        self.body = 0  # length

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.part)[self.got :]

    def buffer_updated(self, nbytes: int) -> None:
        self.got += nbytes
        try:
            while self.got == len(self.part):
                self.next(self.part)
        except BrokenFrame:
            self.abort()

    def read(self, size: int, then: Callable[[bytearray], None]) -> None:
        """Read so many bytes next."""
        self.part, self.got, self.next = bytearray(size), 0, then

    def begin(self, prefix: bytearray) -> None:
        length, self.body = lengths_in(prefix)
        self.read(length, self.take_header)

    def take_header(self, data: bytearray) -> None:
        self.header = read_header(data)
        self.read(self.body, self.take_frame)

    def take_frame(self, data: bytearray) -> None:
        header, self.header = self.header, None
        self.read(PREFIX.size, self.begin)
        if not self.pid:
            if not isinstance(header, dict) or type(header.get("ready")) is not int:
                raise BrokenFrame("a replica says first who it is")
            self.pid = header["ready"]
            return self.owner.on_ready(self)
        reply, batch = read_reply(header, data), self.batch
        if batch is None or reply.batch != batch.number or len(reply.answers) != batch.rows:
            raise BrokenFrame("this reply is to another batch")
        self.idle()
        return self.owner.on_reply(self, batch, reply)

    def compute(self, batch: QueuedBatch[Any], free_at: float) -> None:
        assert self.transport is not None and self.batch is None, "a free replica is given a batch"
        self.batch, self.free_at = batch, free_at
        self.timer = self.loop.call_later(self.hung_after, self.kill)
        self.transport.writelines(batch_frame(batch.number, [one.item.sample for one in batch.requests]))

    def idle(self) -> None:
        self.batch = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def kill(self) -> None:
        """End a replica that hangs. Its line is open, so its pid is still its own."""
        if self.pid and self.transport is not None and not self.transport.is_closing():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def abort(self) -> None:
        self.kill()
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        """End a replica that has no batch; it was asked to."""
        self.closing = True
        if self.transport is not None:
            self.transport.close()

    def eof_received(self) -> bool:
        return False  # close the transport

    def connection_lost(self, error: Exception | None) -> None:
        batch = self.batch
        self.idle()
        self.owner.on_lost(self, batch)
