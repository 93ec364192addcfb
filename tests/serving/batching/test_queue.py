"""Whatever comes, is computed, dies or is withdrawn: no request is lost, none is answered twice, and order and budget hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoestring.serving.batching.policy import SIMILAR, Batching, Waiting
from shoestring.serving.batching.queue import TRIES, Queued, QueuedBatch, RequestQueue

LENGTHS = st.integers(1, 40)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.how = Batching(tokens=60, rows=4, packed=True)
        self.queue: RequestQueue[int] = RequestQueue(self.how)
        self.put: dict[int, Queued[int]] = {}
        self.ended: dict[int, str] = {}  # how every request ended

    def end(self, item: int, how: str) -> None:
        assert item not in self.ended, "a request ends once"
        self.ended[item] = how

    @rule(packed=st.booleans())
    def change_packing(self, packed: bool) -> None:
        self.how = self.queue.how = Batching(tokens=60, rows=4, packed=packed)

    @rule(length=LENGTHS, urgency=st.integers(0, 2), within=st.sampled_from([1.0, 4.0, float("inf")]))
    def put_one(self, length: int, urgency: int, within: float) -> None:
        self.now += 1
        number = len(self.put)
        self.put[number] = self.queue.put(number, Waiting(length, self.now, urgency, self.now + within))

    @rule()
    def take(self) -> None:
        alive = [one for one in self.queue.line if one.waiting.deadline >= self.now]
        batch = self.queue.take(self.now)
        assert (batch is None) == (not alive)
        if batch is None:
            return
        first = min(alive, key=lambda one: (-one.waiting.urgency, one.waiting.arrived))
        assert first in batch.requests, "the oldest of the most urgent is always in the batch"
        assert all(one.waiting.deadline >= self.now and not one.withdrawn for one in batch.requests)
        assert batch.rows == 1 or not any(one.suspect for one in batch.requests), "a suspect is computed alone"
        self.keeps_budget(batch)

    def keeps_budget(self, batch: QueuedBatch[int]) -> None:
        lengths = [one.waiting.length for one in batch.requests]
        size = sum(lengths) if self.how.packed else len(lengths) * max(lengths)
        assert len(lengths) == 1 or (size <= self.how.tokens and len(lengths) <= self.how.rows)
        assert self.how.packed or min(lengths) >= SIMILAR * max(lengths)

    @precondition(lambda self: self.queue.running)
    @rule(data=st.data(), dies=st.booleans())
    def finish(self, data: st.DataObject, dies: bool) -> None:
        batch = self.queue.running[data.draw(st.sampled_from(sorted(self.queue.running)))]
        if not dies:
            self.queue.forget(batch)
            for one in batch.requests:
                if not one.withdrawn:
                    self.end(one.item, "answered")
            return
        alone = batch.rows == 1
        given_up = self.queue.give_back(batch)
        assert all(one.kills == TRIES for one in given_up) and (alone or not given_up)
        for one in given_up:
            self.end(one.item, "given up")

    @precondition(lambda self: self.put.keys() - self.ended.keys())
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.put.keys() - self.ended.keys())))
        self.queue.withdraw(self.put[item])
        self.end(item, "withdrawn")

    @invariant()
    def nobody_is_lost(self) -> None:
        held = [one for one in self.queue.everybody() if not one.withdrawn]
        assert sorted(one.item for one in held) == sorted(self.put.keys() - self.ended.keys())
        assert self.queue.tokens == sum(one.waiting.length for one in self.queue.line)
        ranks = [one.rank for one in self.queue.line]
        assert ranks == sorted(ranks)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=20, stateful_step_count=50)
