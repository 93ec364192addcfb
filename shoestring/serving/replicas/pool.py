"""The pool of one model: its queue, and replicas that take batches from it.

    answers(samples) -> admission -> queue -> free replica -> answers
                                       ^---- replica died

A replica that dies gives its batch back and is replaced. A model process that dies is replaced by a new generation with the same
weights, while the replicas that it leaves behind go on answering. New weights are a new generation too: it begins beside the old one,
takes over, and the old one ends after its last batches. A request's answers are all of one generation.

Nothing polls: all of this happens when a socket or a timer of a request calls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any

from shoestring.core.errors import Mistake, reason_text
from shoestring.serving.batching.admission import AdmissionLoad, Pace
from shoestring.serving.batching.policy import Waiting
from shoestring.serving.batching.queue import Queued, QueuedBatch, RequestQueue
from shoestring.serving.replicas.facts import EngineFacts
from shoestring.serving.replicas.generation import Generation
from shoestring.serving.replicas.happenings import (
    BatchComputed,
    Happening,
    LoadFailed,
    ModelLoaded,
    ModelProcessDied,
    ModelSwapped,
    ReplicaDied,
)
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.replicas.outcomes import ComputationFailed, InputRefused, TooLate, TurnedAway
from shoestring.serving.replicas.pending import PendingRequest, PendingSample
from shoestring.serving.replicas.replica_line import ReplicaLine
from shoestring.serving.replicas.wire import BatchReply, SampleFailed
from shoestring.serving.sample import Sample, Tensors

LONGEST_PAUSE = 60.0  # seconds between two attempts to load a model again


class ReplicaPool:
    def __init__(self, name: str, spec: ModelSpec, tell: Callable[[Happening], None]) -> None:
        self.name, self.spec, self.tell = name, spec, tell
        self.loop = asyncio.get_running_loop()
        self.clock = self.loop.time
        self.queue: RequestQueue[PendingSample] = RequestQueue(spec.batching)
        self.admission, self.pace = spec.admission, Pace()
        self.free: list[ReplicaLine] = []
        self.generation: Generation | None = None
        self.begun = 0  # generations
        self.closed = self.waking = False
        self.swapping = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()
        self.generations: set[Generation] = set()  # of which anything is left
        self.empty = asyncio.Event()
        self.empty.set()
        self.alive, self.life = os.pipe()  # replicas hold one end, this process the other: they end with it

    async def start(self) -> EngineFacts:
        generation = await self.begin(self.spec)
        self.take_over(generation)
        assert generation.facts is not None, "it has started"
        self.tell(ModelLoaded(self.name, self.spec.replicas, generation.facts.memory))
        return generation.facts

    async def begin(self, spec: ModelSpec) -> Generation:
        self.begun += 1
        generation = Generation(spec, self.begun, self.alive, self, self.on_model_end)
        self.generations.add(generation)
        generation.gone.add_done_callback(lambda _: self.generations.discard(generation))
        await generation.start()
        if self.closed:
            await generation.close()
            raise Mistake(f"{self.name} was unloaded while it was loaded")
        return generation

    def take_over(self, generation: Generation) -> Generation | None:
        """Give all batches to this generation from now on; gives the one before."""
        before, self.generation = self.generation, generation
        self.free = [line for line in generation.lines if line.pid and line.batch is None]
        self.wake()
        return before

    @property
    def facts(self) -> EngineFacts:
        assert self.generation is not None and self.generation.facts is not None, "a pool that was started has a model"
        return self.generation.facts

    @property
    def lines(self) -> Sequence[ReplicaLine]:
        return [line for line in self.generation.lines if line.pid] if self.generation else []

    @property
    def is_ready(self) -> bool:
        """Whether a request would be computed now."""
        return not self.closed and bool(self.lines)

    # Requests

    async def answers(self, samples: Sequence[Sample], urgency: int = 0, within: float = inf) -> list[Tensors]:
        """What the model says to each sample; an `Unanswered` if it says nothing. `within`: seconds until nobody wants it."""
        if self.closed:
            raise TurnedAway(f"{self.name} is not served any more", 1.0)
        now, tokens = self.clock(), sum(one.length for one in samples)
        turned = self.admission.refusal(self.load(now), len(samples), tokens, self.pace.factor, within)
        if turned:
            raise TurnedAway(turned.reason, turned.retry_after)
        if not samples:
            return []
        request = PendingRequest(samples, self.loop.create_future())
        request.queued = [
            self.queue.put(PendingSample(request, place), Waiting(one.length, now, urgency, now + within))
            for place, one in enumerate(samples)
        ]
        self.wake()
        late = TooLate(f"its deadline of {within:.3g} s passed before it was answered")
        timer = self.loop.call_later(within, request.fail, late) if within < inf else None
        try:
            return await request.done
        finally:
            if timer is not None:
                timer.cancel()
            self.withdraw(request)

    def withdraw(self, request: PendingRequest) -> None:
        if len(request.answers) < len(request.samples):  # it failed, or nobody wants it
            for one in request.queued:
                self.queue.withdraw(one)
        self.look_empty()

    def load(self, now: float) -> AdmissionLoad:
        busy = [max(line.free_at - now, 0.0) if line.batch else 0.0 for line in self.lines]
        return AdmissionLoad(len(self.queue), self.queue.tokens, busy or [0.0] * self.spec.replicas)

    # Batches

    def wake(self) -> None:
        """Give free replicas batches, after all requests that came at the same time were put into the queue."""
        self.empty.clear()
        if not self.waking:
            self.waking = True
            self.loop.call_soon(self.dispatch)

    def dispatch(self) -> None:
        self.waking = False
        while self.free and (batch := self.queue.take(now := self.clock())):
            line = self.free.pop()
            line.compute(batch, now + self.predicted_seconds(batch) * self.pace.factor)
        self.look_empty()

    def predicted_seconds(self, batch: QueuedBatch[Any]) -> float:
        time = self.spec.time
        return time.seconds(batch.rows, batch.tokens) if time else 0.0

    def look_empty(self) -> None:
        if self.queue.is_empty:
            self.empty.set()

    def on_ready(self, line: ReplicaLine) -> None:
        generation = line.home
        generation.is_ready()
        if generation is self.generation:
            self.free.append(line)
            self.wake()

    def on_reply(self, line: ReplicaLine, batch: QueuedBatch[PendingSample], reply: BatchReply) -> None:
        self.queue.forget(batch)
        for one, answer in zip(batch.requests, reply.answers, strict=True):
            self.take_answer(one, line.home.number, answer)
        self.pace = self.pace.after(self.predicted_seconds(batch), reply.seconds)
        self.tell(BatchComputed(self.name, batch.rows, batch.tokens, reply.seconds))
        generation = line.home
        if generation.retired:
            line.close()
        elif generation is self.generation:
            self.free.append(line)
        self.wake()

    def take_answer(self, one: Queued[PendingSample], generation: int, answer: Tensors | SampleFailed) -> None:
        request = one.item.request
        if isinstance(answer, SampleFailed):
            return request.fail(InputRefused(answer.text) if answer.of_input else ComputationFailed(answer.text))
        for place in request.answer(one.item.place, generation, answer):
            again = self.queue.put(PendingSample(request, place), request.queued[place].waiting)
            request.queued[place] = again
        return None

    def on_lost(self, line: ReplicaLine, batch: QueuedBatch[PendingSample] | None) -> None:
        if line in self.free:
            self.free.remove(line)
        given_up = self.queue.give_back(batch) if batch else []
        for one in given_up:
            one.item.request.fail(ComputationFailed(f"{one.kills} processes died while they computed it"))
        generation = line.home
        if not line.closing:
            self.tell(ReplicaDied(self.name, line.pid, (batch.rows if batch else 0) - len(given_up), len(given_up)))
        if generation.on_replica_end(line) and not self.closed:
            self.run(generation.add())
        elif generation is self.generation and not generation.lines and not self.closed:
            self.replace(generation)
        self.wake()

    # Generations

    def on_model_end(self, generation: Generation, how: str) -> None:
        if self.closed or generation.retired:
            return
        self.tell(ModelProcessDied(self.name, how))
        if generation is self.generation:
            self.replace(generation)

    def replace(self, generation: Generation) -> None:
        """Load the same weights again, because no replica can be forked of those that were."""
        if not self.swapping.locked():
            self.run(self.reload(generation))

    async def reload(self, generation: Generation) -> None:
        async with self.swapping:
            pause = 1.0
            while generation is self.generation and not self.closed:
                try:
                    new = await self.begin(self.spec)
                except Exception as error:
                    self.tell(LoadFailed(self.name, reason_text(error), pause))
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                else:
                    self.take_over(new)
                    await generation.drain()

    async def swap(self, spec: ModelSpec) -> None:
        """Answer with another model from now on. What fails before it could answer changes nothing, and is raised."""
        try:
            async with self.swapping:
                await self.swap_to(spec, await self.begin(spec))
        finally:
            if self.generation is not None and not self.generation.handle.is_open and not self.closed:
                self.replace(self.generation)  # its model process died meanwhile
        self.tell(ModelSwapped(self.name))

    async def swap_to(self, spec: ModelSpec, new: Generation) -> None:
        assert new.facts is not None, "it has started"
        if new.facts.signature.inputs != self.facts.signature.inputs:
            await new.close()
            raise Mistake(
                f"the new model of {self.name} takes {new.facts.signature.inputs}, and waiting requests have "
                f"{self.facts.signature.inputs}: serve it under another name"
            )
        self.spec, self.admission, self.pace = spec, spec.admission, Pace()
        self.queue.how = spec.batching
        before = self.take_over(new)
        if before is not None:
            await before.drain()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # The end

    async def drain(self) -> None:
        """Wait until every request has its answer."""
        self.look_empty()
        await self.empty.wait()

    async def close(self, why: str = "the server stops") -> None:
        """End everything; what has no answer gets none."""
        self.closed = True
        for one in list(self.queue.everybody()):
            one.item.request.fail(TurnedAway(f"{self.name} is not served any more: {why}", 1.0))
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in list(self.generations)))
        for end in (self.alive, self.life):
            os.close(end)
