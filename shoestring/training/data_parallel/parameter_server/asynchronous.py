"""Asynchronous: no worker waits for another. A gradient is applied when it arrives, to weights that may have moved
since it was begun.

    server     the first worker keeps weights and optimizer (a parameter server); the others pull weights and push gradients
    hogwild    all compute, and step weights in shared memory without a lock; on one machine
    step       one batch of samples, cut into as many parts as workers compute; whoever is free takes the next part
    sent       p to a worker and g back for each push      p, g: bytes of weights and of gradients; hogwild: nothing
    time       max(compute + (p + g) / speed,  w ((p + g) / speed + update))    for w equally fast workers; a slow one does less

Staleness s of a push: updates of the weights since the version its gradient was computed on. With `correct`, the rate
of that step is divided by max(s, 1), so that older gradients count less: Zhang, Gupta, Lian, Liu: Staleness-aware
async-SGD for Distributed Deep Learning, 2015, arXiv 1511.05950. No push is staler than `delay`: a pull waits while it
could lead to a staler push (stale synchronous parallel: Ho et al.: More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server, 2013, NeurIPS). With a delay of 0 one worker computes at a time. Nothing is
dropped, and every part is trained on once; a restart loses the pushes in flight.
Niu, Recht, Re, Wright: Hogwild!, 2011, arXiv 1106.5730; Dean et al.: Large Scale Distributed Deep Networks, 2012,
NeurIPS.

The order of pushes depends on timing, so two runs differ. The effect on learning can't be predicted: the planner uses
it only on request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger, interpolate
from shoestring.core.costs.ledger_parts import Traffic
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.data_parallel import data_parallel_refusal, mixed_drift, trained_parameters
from shoestring.training.data_parallel.hogwild import hogwild_run
from shoestring.training.data_parallel.learning_rate import rate_times
from shoestring.training.data_parallel.parameter_server.client import Client, client_run
from shoestring.training.data_parallel.parameter_server.pushes import Pushes, may_begin
from shoestring.training.data_parallel.parameter_server.server import ASK, AssignmentServer
from shoestring.training.data_parallel.reducer import BUCKET
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.technique import Owned

KINDS = ("server", "hogwild")
LONGEST = 1000  # largest delay: every staleness up to it is counted


@dataclass(frozen=True)
class Asynchronous(GroupTechnique):
    """Let every worker's gradient move the weights as soon as it arrives.

    Costs: gradients of older weights, and results that differ from run to run.

    Not for: workers of equal speed, which hardly wait for each other, and results that have to be reproduced.
    """

    kind: str = "server"  # "server": the first worker keeps the weights; "hogwild": they are in shared memory
    delay: int = 8  # largest staleness
    correct: bool = True  # divide the rate of a step by its staleness

    order: ClassVar[int] = 60
    exact: ClassVar[bool] = False
    unites: ClassVar[str] = "data"
    why: ClassVar[str] = (
        "no worker waits for a slower one; gradients are applied as they arrive, to weights that may have moved on"
    )
    on_request: ClassVar[bool] = True

    @property
    def agrees(self) -> float:
        return 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(f"Asynchronous(kind={self.kind!r}): there are {' and '.join(KINDS)}")
        if not 0 <= self.delay <= LONGEST:
            raise Mistake(
                f"Asynchronous(delay={self.delay}): the largest staleness is a number from 0 (one worker at a time) to {LONGEST}"
            )

    @property
    def serves(self) -> bool:
        return self.kind == "server"

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.WEIGHTS} if self.kind == "hogwild" else ())

    def refusal(self, ledger: Ledger) -> str:
        return data_parallel_refusal(ledger)

    def drift(self, ledger: Ledger) -> float:
        """One step makes as many updates as there are computing workers, each at the full rate, so weights may move
        that many times as far."""
        return float(ledger.workers.world) + mixed_drift(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        return ledger if self.kind == "hogwild" else server_ledger(ledger)

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        check(run, link, "Asynchronous", 2)
        if self.kind == "hogwild":
            return hogwild_run(run, link, self.delay, self.correct)
        return client_run(run, Client(run, link)) if link.rank else self.server_run(run, link)

    def server_run(self, run: Run, link: Link) -> Run:
        server = AssignmentServer(run, link, WorkQueue(self.delay), Pushes(self.correct))
        stale = 0  # staleness of the push that is applied next

        def gradients(now: Run, batch: Batch) -> Tensor:
            nonlocal stale
            losses = []
            for number in range(server.parts):
                if number:
                    now.update(now)
                push = server.next_push()
                stale = push.staleness
                server.pushes.add(push.rank, stale)
                losses.append((push.loss, push.weight))
                server.set_gradients(push.used, push.flats)
            return server.mean(losses)

        def update(now: Run) -> None:
            with rate_times(now.optimizer, 1 / max(stale, 1) if self.correct else 1.0):
                run.update(now)
            server.version += 1

        return replace(
            run,
            gradients=gradients,
            update=update,
            team=replace(run.team, assignment=server),
            state={**run.state, "pushes": server.pushes},
        )


class WorkQueue:
    """Hands out parts of batches in order, and weights only while no gradient can become too stale."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.next: int | None = None

    def next_part(self, server: AssignmentServer, rank: int) -> tuple[int, int]:
        number = server.batch * server.parts if self.next is None else self.next  # counts all parts of all batches
        self.next = number + 1
        return divmod(number, server.parts)

    def may_go_on(self, server: AssignmentServer, rank: int, kind: int) -> bool:
        return kind == ASK or may_begin(server.version, server.computing.values(), self.delay)


def check(run: Run, link: Link, name: str, least: int) -> None:
    """Refuse a group that can't train this way."""
    if link.world < least:
        raise Mistake(
            f"{name} needs {least} processes or more, and this group has {link.world}: give --devices {least}"
        )
    if any(weight.is_cuda for weight in trained_parameters(run)):
        raise Mistake(
            f"{name}: weights are on a GPU, and workers exchange them one by one between CPUs only: use DataParallel"
        )


def server_ledger(ledger: Ledger) -> Ledger:
    """The ledger of a group in which one worker keeps the weights and the others compute.

    The timeline is a computing worker's up to the update, then the server's: only the server has moments, and it holds
    nothing else.
    """
    world, standing, update = ledger.workers.world, ledger.standing, ledger.update
    workers = world - 1
    at_zero_batch = ledger.at_zero_batch or ledger.blocks
    blocks = tuple(
        interpolate(none, full, world / workers).with_changes(
            forward=full.forward * world / workers, backward=full.backward * world / workers
        )
        for none, full in zip(at_zero_batch, ledger.blocks, strict=True)
    )
    held = ledger.all_gradients
    talk = ledger.workers.seconds(standing.parameters + held, messages=2 * (held / BUCKET + 1) + 4)
    compute = ledger.pieces * sum(block.forward + block.backward for block in blocks)
    busy = workers * (talk + update.seconds)
    return replace(
        ledger,
        blocks=tuple(block.with_changes(spike=block.spike + min(BUCKET, max(block.gradient, 0.0))) for block in blocks),
        batch=-(-ledger.batch * world // workers),
        standing=replace(standing, inputs=standing.inputs * world / workers, optimizer=0.0),
        update=replace(update, seconds=0.0, rise=update.rise + standing.optimizer),
        traffic=ledger.traffic
        + Traffic(
            sent=workers * standing.parameters,  # by the server, which sends most
            waiting=max(talk, busy - compute),
        ),
    )
