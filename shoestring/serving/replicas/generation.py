"""A generation: one model process, and the replicas that have its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoestring.core.errors import Mistake
from shoestring.serving.replicas.facts import EngineFacts
from shoestring.serving.replicas.model_handle import ModelHandle
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.replicas.replica_line import LineOwner, ReplicaLine

STILLBORN = 5  # replicas in a row that died before they were ready: more will not help


class Generation:
    def __init__(
        self, spec: ModelSpec, number: int, alive: int, owner: LineOwner, on_end: Callable[[Generation, str], None]
    ) -> None:
        self.spec, self.number, self.owner = spec, number, owner
        self.handle = ModelHandle(spec, alive, lambda how: on_end(self, how))
        self.lines: set[ReplicaLine] = set()  # ready ones, and those that begin
        self.stillborn = 0
        self.retired = False
        self.facts: EngineFacts | None = None
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()  # all replicas of the beginning are
        self.gone: asyncio.Future[None] = loop.create_future()  # retired, and the last replica has ended

    async def start(self) -> EngineFacts:
        """Load the model and begin its replicas; a mistake if that fails."""
        try:
            self.facts = await self.handle.load()
            for _ in range(self.spec.replicas):
                await self.add()
            async with asyncio.timeout(self.spec.load_seconds):
                await self.ready
        except TimeoutError:
            await self.close()
            raise Mistake(f"its replicas were not ready within {self.spec.load_seconds:.0f} s") from None
        except BaseException:
            await self.close()
            raise
        return self.facts

    async def add(self) -> None:
        """Begin a replica."""
        line = ReplicaLine(self.owner, self, self.spec.batch_seconds)
        self.lines.add(line)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: line, sock=self.handle.fork())
        if self.retired:
            line.close()

    def is_ready(self) -> None:
        """A replica became ready."""
        self.stillborn = 0
        if sum(line.pid > 0 for line in self.lines) >= self.spec.replicas and not self.ready.done():
            self.ready.set_result(None)

    def on_replica_end(self, line: ReplicaLine) -> bool:
        """A replica ended; gives whether another one should begin."""
        self.lines.discard(line)
        if self.retired:
            self.look_gone()
            return False
        self.stillborn = 0 if line.pid else self.stillborn + 1
        if self.stillborn >= STILLBORN and not self.ready.done():
            self.ready.set_exception(Mistake(f"{STILLBORN} replicas in a row died before they could answer"))
        return self.stillborn < STILLBORN and self.handle.is_open

    def retire(self) -> None:
        """End every replica as soon as it has no batch."""
        self.retired = True
        for line in list(self.lines):
            if line.batch is None:
                line.close()
        self.look_gone()

    def look_gone(self) -> None:
        if not self.lines and not self.gone.done():
            self.gone.set_result(None)

    async def drain(self) -> None:
        """Retire it, and wait until nothing of it is left."""
        self.retire()
        await self.gone
        await self.handle.close()

    async def close(self) -> None:
        """End it at once."""
        self.retired = True
        for line in list(self.lines):
            line.closing = True
            line.abort()
        await self.handle.close()
        self.look_gone()
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # it was looked at
