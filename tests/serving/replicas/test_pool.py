"""The pool with real processes: whatever is killed, every accepted request gets its own answer, once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import torch

from shoestring.core.errors import Mistake
from shoestring.serving.batching.policy import Batching
from shoestring.serving.replicas.happenings import (
    BatchComputed,
    Happening,
    LoadFailed,
    ModelLoaded,
    ModelProcessDied,
    ReplicaDied,
)
from shoestring.serving.replicas.model_spec import ModelSpec
from shoestring.serving.replicas.outcomes import ComputationFailed, InputRefused, TooLate, TurnedAway
from shoestring.serving.replicas.pool import ReplicaPool
from tests.serving import tiny
from tests.serving.tiny import BROKEN, GATED, POISON, REFUSED, SLOW, sample, spec
from tests.waiting import Gates, soon, until_gone, until_so

T = TypeVar("T", bound=Happening)
pytestmark = pytest.mark.usefixtures("warm_workers")


class Told:
    """Waits for what the pool tells."""

    def __init__(self) -> None:
        self.all: list[Happening] = []
        self.new = asyncio.Condition()

    def __call__(self, one: Happening) -> None:
        self.all.append(one)
        asyncio.get_running_loop().create_task(self.wake())

    async def wake(self) -> None:
        async with self.new:
            self.new.notify_all()

    def count(self, kind: type[Happening]) -> int:
        return sum(isinstance(one, kind) for one in self.all)

    async def until(self, kind: type[Happening], times: int = 1) -> None:
        async with self.new:
            await soon(self.new.wait_for(lambda: self.count(kind) >= times))


@asynccontextmanager
async def pooled(model: ModelSpec) -> AsyncIterator[tuple[ReplicaPool, Told]]:
    told = Told()
    pool = ReplicaPool("tiny", model, told)
    try:
        await soon(pool.start())
        yield pool, told
    finally:
        await soon(pool.close())


def run(test: Callable[[ReplicaPool, Told], Coroutine[Any, Any, None]], model: ModelSpec) -> None:
    async def whole() -> None:
        async with pooled(model) as (pool, told):
            await test(pool, told)

    asyncio.run(whole())


async def total(pool: ReplicaPool, *numbers: float, **how: Any) -> float:
    (answer,) = await soon(pool.answers([sample(*numbers)], **how))
    return float(answer["total"])


def test_every_sample_gets_its_own_answer_in_batches() -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        totals = await asyncio.gather(*(total(pool, float(n), 1.0) for n in range(100)))
        assert totals == [2.0 * n + 2 for n in range(100)]
        answers = await pool.answers([sample(1.0), sample(2.0, 3.0), sample()])
        assert [one["y"].tolist() for one in answers] == [[2.0], [4.0, 6.0], []]
        batches = [one for one in told.all if isinstance(one, BatchComputed)]
        assert len(batches) < 60 and all(one.tokens <= 64 for one in batches), (
            "requests that came together went together"
        )
        assert pool.queue.is_empty and pool.facts.memory > 0 and pool.facts.signature == tiny.SIGNATURE

    run(test, spec(replicas=2))


def test_a_sample_that_the_model_refuses_harms_nobody_in_its_batch() -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        found = await asyncio.gather(
            *(total(pool, first) for first in (1.0, REFUSED, 3.0, BROKEN)), return_exceptions=True
        )
        assert found[0::2] == [2.0, 6.0]
        assert isinstance(found[1], InputRefused) and "index out of range" in str(found[1])
        assert isinstance(found[3], ComputationFailed) and "it broke" in str(found[3])
        assert told.count(BatchComputed) == 1 and told.count(ReplicaDied) == 0

    run(test, spec())


def test_a_request_that_kills_replicas_is_given_up_and_takes_no_other_with_it() -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        found = await asyncio.gather(*(total(pool, first) for first in (1.0, POISON, 3.0)), return_exceptions=True)
        assert found[0::2] == [2.0, 6.0]
        assert isinstance(found[1], ComputationFailed) and "2 processes died" in str(found[1])
        assert told.count(ReplicaDied) == 3 and told.count(ModelLoaded) == 1, "in its batch, and twice alone"

    run(test, spec())


def test_a_deadline_that_passes_is_told_and_its_request_is_not_computed(tmp_path: Path) -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        with Gates(tmp_path, 0) as gates:
            first = asyncio.ensure_future(pool.answers([sample(GATED)]))
            await until_so(lambda: all(line.batch for line in pool.lines))
            with pytest.raises(TooLate):
                await pool.answers([sample(5.0)], within=1e-4)
            abandoned = asyncio.ensure_future(pool.answers([sample(6.0)]))
            await until_so(lambda: len(pool.queue))
            abandoned.cancel()
            await asyncio.wait([abandoned])
            gates.open(0)
            await soon(first)
        await soon(pool.drain())
        assert [one.rows for one in told.all if isinstance(one, BatchComputed)] == [1]

    run(test, spec(gate=str(tmp_path / "gate-0")))


def test_what_can_not_be_answered_in_time_is_turned_away_at_once(tmp_path: Path) -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        with Gates(tmp_path, 0) as gates:
            waiting = asyncio.ensure_future(pool.answers([sample(GATED)]))
            await until_so(lambda: all(line.batch for line in pool.lines))
            with pytest.raises(TurnedAway, match=r"answered in .*later than 3 s") as told_:
                await pool.answers([sample(1.0, 1.0, 1.0)])
            assert 0 < told_.value.retry_after < 10
            gates.open(0)
            await soon(waiting)
        assert await total(pool, *[1.0] * 9) == 18.0, "alone it is computed, whatever it takes"
        with pytest.raises(TurnedAway, match="without anybody before it"):
            await pool.answers([sample(1.0, 1.0, 1.0)], within=1.0)

    run(test, spec(gate=str(tmp_path / "gate-0"), time=SLOW, target=3.0, margin=1.0))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_no_kill_of_any_process_loses_a_request_or_changes_an_answer(kills: int) -> None:
    """Kills at random, of replicas and of model processes, while requests go on."""

    async def test(pool: ReplicaPool, told: Told) -> None:
        draw, served, stop = Random(7), [0], asyncio.Event()

        async def client(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                assert await total(pool, float(number), float(turn)) == 2.0 * (number + turn)
                served[0] += 1

        clients = [asyncio.ensure_future(client(one)) for one in range(16)]
        for kill in range(kills):
            before, dead = served[0], told.count(ReplicaDied)
            handle = pool.generation.handle if pool.generation else None
            if kill % 5 == 1 and handle and handle.process and handle.is_open:
                deaths = told.count(ModelProcessDied)
                handle.process.kill()
                await told.until(ModelProcessDied, deaths + 1)
            elif pool.lines:
                os.kill(draw.choice(pool.lines).pid, signal.SIGKILL)
                await told.until(ReplicaDied, dead + 1)
            await told.until(BatchComputed, told.count(BatchComputed) + draw.randrange(1, 40))
            assert not any(one.done() for one in clients), [one for one in clients if one.done()]
            assert served[0] >= before
        stop.set()
        await soon(asyncio.gather(*clients))
        assert pool.queue.is_empty and served[0] > 20

    run(test, spec(replicas=2))


def test_a_killed_model_process_is_replaced_while_its_replicas_answer() -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        assert pool.generation is not None and pool.generation.handle.process is not None
        old = {line.pid for line in pool.lines}
        pool.generation.handle.process.kill()
        await told.until(ModelProcessDied)
        assert await total(pool, 4.0) == 8.0
        await until_so(lambda: pool.begun == 2 and pool.lines and not old & {line.pid for line in pool.lines})
        assert await total(pool, 5.0) == 10.0 and told.count(ReplicaDied) == 0

    run(test, spec(replicas=2))


def test_a_model_that_can_not_be_loaded_again_is_tried_until_it_can(tmp_path: Path) -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        assert pool.generation is not None and pool.generation.handle.process is not None
        (tmp_path / "moved").write_text("")
        pool.generation.handle.process.kill()
        await told.until(LoadFailed)
        assert await total(pool, 4.0) == 8.0, "the replicas that are left answer"
        os.kill(pool.lines[0].pid, signal.SIGKILL)
        await told.until(ReplicaDied)
        assert not pool.is_ready
        (tmp_path / "moved").unlink()
        assert await total(pool, 5.0) == 10.0, "who waited is answered"

    moved = {"exists": str(tmp_path / "moved")}
    run(test, ModelSpec(load=tiny.scale_unless, batching=Batching(64), arguments=moved))


def test_weights_are_swapped_under_load_without_a_failed_request() -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        stop, seen = asyncio.Event(), set()

        async def client() -> None:
            while not stop.is_set():
                first, second = await pool.answers([sample(1.0), sample(1.0, 0.0)])
                assert float(first["total"]) == float(second["total"]), "both are of the same weights"
                seen.add(float(first["total"]))

        clients = [asyncio.ensure_future(client()) for _ in range(8)]
        for weight in (3.0, 4.0):
            await soon(pool.swap(spec(weight, replicas=2)))
            assert await total(pool, 1.0) == weight
        stop.set()
        await soon(asyncio.gather(*clients))
        assert seen == {2.0, 3.0, 4.0} and told.count(ReplicaDied) == 0 and len(pool.generations) == 1

    run(test, spec(replicas=2))


def test_a_swap_that_fails_changes_nothing() -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        for load, said in ((tiny.unloadable, "no weights here"), (tiny.dies, "exit code 7")):
            with pytest.raises(Mistake, match=said):
                await soon(pool.swap(ModelSpec(load=load, batching=Batching(64))))
            assert await total(pool, 1.0) == 2.0
        assert told.count(LoadFailed) == told.count(ReplicaDied) == 0 and len(pool.generations) == 1

    run(test, spec())


async def no_test(pool: ReplicaPool, told: Told) -> None:
    raise AssertionError("it does not start")


def test_a_model_that_can_not_be_loaded_is_a_mistake() -> None:
    with pytest.raises(Mistake, match="no weights here"):
        run(no_test, ModelSpec(load=tiny.unloadable, batching=Batching(64)))
    with pytest.raises(Mistake, match="define it at the top of a module"):
        ModelSpec(load=lambda: tiny.scale(3.0), batching=Batching(64))
    with pytest.raises(Mistake, match="as JSON"):
        spec(load=tiny.scale, arguments={"weight": torch.zeros(3)})


def test_a_replica_that_hangs_is_killed_and_its_request_given_up(tmp_path: Path) -> None:
    async def test(pool: ReplicaPool, told: Told) -> None:
        with Gates(tmp_path, 0):
            with pytest.raises(ComputationFailed, match="2 processes died"):
                await soon(pool.answers([sample(GATED)]))
            assert await total(pool, 1.0) == 2.0

    run(test, spec(gate=str(tmp_path / "gate-0"), batch_seconds=1e-2))


def test_closing_ends_all_processes_and_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    pids: list[int] = []

    async def test(pool: ReplicaPool, told: Told) -> None:
        assert pool.generation is not None and pool.generation.handle.process is not None
        pids.extend([pool.generation.handle.process.pid, *(line.pid for line in pool.lines)])

    run(test, spec(replicas=3))
    for pid in pids:
        until_gone(pid)
    assert len(pids) == 4 and set(os.listdir("/proc/self/fd")) <= before
