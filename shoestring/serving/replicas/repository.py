"""The models of a server by name, under one memory budget: loaded when first asked for, least recently used evicted.

A model that is pinned is never evicted; one that was unloaded by request stays so until it is loaded by request.
A request that waits for a model to be loaded is answered by it; an evicted model answers first what it has accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from shoestring.core.errors import Mistake, reason_text
from shoestring.core.units import bytes_text
from shoestring.serving.replicas.facts import EngineFacts
from shoestring.serving.replicas.happenings import Happening, ModelUnloaded
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.replicas.outcomes import TurnedAway
from shoestring.serving.replicas.pool import ReplicaPool


class UnknownModel(Exception):
    """No model has that name, or it was unloaded by request."""


@dataclass(frozen=True)
class ModelState:
    """A line of the repository's index."""

    name: str
    version: str
    state: str  # READY, LOADING or UNAVAILABLE: the protocol's words
    reason: str


class ModelRepository:
    def __init__(self, specs: Mapping[str, ModelSpec], memory: int | None, tell: Callable[[Happening], None]) -> None:
        self.specs, self.memory, self.tell = dict(specs), memory, tell
        self.pools: dict[str, ReplicaPool] = {}
        self.facts: dict[str, EngineFacts] = {}  # also of those that were evicted
        self.used: dict[str, int] = {}  # when a model was last asked for, by a counter
        self.turns = count()
        self.loading: dict[str, asyncio.Task[ReplicaPool]] = {}
        self.reasons: dict[str, str] = {}  # why a model is not there
        self.unloaded: set[str] = set()  # by request
        self.one_at_a_time = asyncio.Lock()
        self.closed = False

    def spec(self, name: str) -> ModelSpec:
        if name not in self.specs:
            raise UnknownModel(f"no model is called {name!r}; there are: {', '.join(map(repr, self.specs))}")
        return self.specs[name]

    async def pool(self, name: str) -> ReplicaPool:
        """The pool of a model, loaded now if it is not."""
        self.used[name] = next(self.turns)
        if name in self.pools:
            return self.pools[name]
        self.spec(name)
        if name in self.unloaded:
            raise UnknownModel(f"{name!r} was unloaded; load it first")
        return await self.load(name)

    async def load(self, name: str) -> ReplicaPool:
        """Load a model; together with others who ask for it meanwhile."""
        if self.closed:
            raise TurnedAway("the server stops", 1.0)
        self.spec(name)
        self.unloaded.discard(name)
        if name in self.pools:
            return self.pools[name]
        if name not in self.loading:
            task = self.loading[name] = asyncio.create_task(self.begin(name))
            task.add_done_callback(lambda _: self.loading.pop(name, None))
        return await asyncio.shield(self.loading[name])

    async def begin(self, name: str) -> ReplicaPool:
        async with self.one_at_a_time:
            pool = ReplicaPool(name, self.specs[name], self.tell)
            try:
                await self.make_room(name, self.needs(name))
                self.facts[name] = await pool.start()
                await self.make_room(name, self.needs(name))
            except BaseException as error:
                self.reasons[name] = reason_text(error)
                await pool.close()
                raise
            self.reasons.pop(name, None)
            self.used[name] = next(self.turns)
            self.pools[name] = pool
            return pool

    def needs(self, name: str) -> int:
        """Bytes that a model takes; 0 if that is not known before it is loaded."""
        return self.specs[name].memory or (self.facts[name].memory if name in self.facts else 0)

    async def make_room(self, name: str, wanted: int) -> None:
        """Evict models until there is room for this one."""
        if self.memory is None:
            return
        if wanted > self.memory:
            raise Mistake(
                f"{name!r} needs {bytes_text(wanted)}, and all models together may have {bytes_text(self.memory)}: "
                f"give more memory, or compress it"
            )
        while wanted + sum(map(self.needs, self.pools)) > self.memory:
            old = [one for one in self.pools if not self.specs[one].pinned]
            if not old:
                raise Mistake(
                    f"{name!r} needs {bytes_text(wanted)}, and pinned models leave "
                    f"{bytes_text(self.memory - sum(map(self.needs, self.pools)))}: unpin or unload one"
                )
            await self.end(min(old, key=lambda one: self.used[one]), f"evicted for {name!r}")

    async def end(self, name: str, why: str) -> None:
        pool = self.pools.pop(name)  # first, so that nobody asks it any more
        self.reasons[name] = why
        await pool.drain()
        await pool.close(why)
        self.tell(ModelUnloaded(name, why))

    async def unload(self, name: str) -> None:
        self.spec(name)
        self.unloaded.add(name)
        async with self.one_at_a_time:
            if name in self.pools:
                await self.end(name, "unloaded")
            self.reasons[name] = "unloaded"

    async def swap(self, name: str, spec: ModelSpec) -> None:
        """Answer under this name with another model from now on; see `ReplicaPool.swap`."""
        self.spec(name)
        async with self.one_at_a_time:
            if name in self.pools:
                await self.pools[name].swap(spec)
                self.facts[name] = self.pools[name].facts
            self.specs[name] = spec

    def index(self) -> list[ModelState]:
        return [self.state(name) for name in self.specs]

    def state(self, name: str) -> ModelState:
        version = self.spec(name).version
        if name in self.loading:
            return ModelState(name, version, "LOADING", "")
        if name in self.pools and self.pools[name].is_ready:
            return ModelState(name, version, "READY", "")
        return ModelState(name, version, "UNAVAILABLE", self.reasons.get(name, "it is loaded with its first request"))

    @property
    def is_ready(self) -> bool:
        """Whether every model that should be there is."""
        return not self.closed and all(pool.is_ready for pool in self.pools.values()) and not self.loading

    async def drain(self) -> None:
        await asyncio.gather(*(pool.drain() for pool in self.pools.values()))

    async def close(self) -> None:
        self.closed = True
        for task in list(self.loading.values()):
            task.cancel()
        await asyncio.gather(*self.loading.values(), return_exceptions=True)
        pools, self.pools = list(self.pools.values()), {}
        await asyncio.gather(*(pool.close() for pool in pools))
