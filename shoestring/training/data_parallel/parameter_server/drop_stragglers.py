"""DropStragglers: every round the server uses the gradients that come first, and drops those of the slowest workers.

    used      w - backup of w gradients, averaged by their weights    (w - backup) / w of a batch's samples
    sent      p to a worker and g back for each                       p, g: bytes of weights and of gradients
    time      that of the (w - backup)-th fastest worker

Gradients that come after their round is over belong to old weights: they are dropped and counted. A late worker goes on
with the batch of the present round. No gradient is stale, so the rate needs no correction. Which samples count depends
on timing, so two runs differ, and the planner uses it only on request.
Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016, arXiv 1604.00981.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.data_parallel import gradient_sum_refusal, mixed_drift
from shoestring.training.data_parallel.parameter_server.asynchronous import check, server_ledger
from shoestring.training.data_parallel.parameter_server.client import Client, client_run
from shoestring.training.data_parallel.parameter_server.pushes import Pushes
from shoestring.training.data_parallel.parameter_server.server import PULL, AssignmentServer, Push
from shoestring.training.group_technique import GroupTechnique


@dataclass(frozen=True)
class DropStragglers(GroupTechnique):
    """Go on in every round without the last gradients.

    Costs: the work of the workers that were dropped, and results that differ from run to run.

    Not for: workers of equal speed: then every dropped gradient is work lost.
    """

    backup: int = 1  # number of gradients per round that are not waited for

    order: ClassVar[int] = 60
    exact: ClassVar[bool] = False
    unites: ClassVar[str] = "data"
    why: ClassVar[str] = "every round goes on without the gradients of the slowest workers"
    on_request: ClassVar[bool] = True

    @property
    def agrees(self) -> float:
        return 0.0

    @property
    def serves(self) -> bool:
        return True

    def __post_init__(self) -> None:
        if self.backup < 1:
            raise Mistake(
                f"DropStragglers(backup={self.backup}): give 1 or more gradients not to wait for; DataParallel waits for all"
            )

    def refusal(self, ledger: Ledger) -> str:
        least, world = self.backup + 2, ledger.workers.world
        return (
            gradient_sum_refusal(ledger)
            if world >= least
            else (
                f"of {world - 1} workers that compute, {self.backup} are not waited for and none is left: --devices {least} or more"
            )
        )

    def drift(self, ledger: Ledger) -> float:
        """Each step uses a part of its batch only."""
        return 1.0 + mixed_drift(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        made = server_ledger(ledger)
        rise = made.update.rise + ledger.all_gradients  # one gradient arrives while the others are summed
        return replace(made, update=replace(made.update, rise=rise))

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        check(run, link, "DropStragglers", self.backup + 2)
        return client_run(run, Client(run, link)) if link.rank else self.server_run(run, link)

    def server_run(self, run: Run, link: Link) -> Run:
        server = AssignmentServer(run, link, OnePartPerRound(), Pushes(corrected=None))

        def gradients(now: Run, batch: Batch) -> Tensor:
            losses: list[tuple[float, float]] = []
            used: set[nn.Parameter] = set()
            total: list[Tensor] = []
            while len(losses) < server.parts - self.backup or not any(weight for _, weight in losses):
                push = server.next_push()
                if push.staleness:
                    server.pushes.dropped[push.rank] += 1
                else:
                    server.pushes.add(push.rank, 0)
                    losses.append((push.loss, push.weight))
                    used |= push.used
                    add(total, push)
                push.flats.clear()
            whole = sum(weight for _, weight in losses)
            for flat in total:
                flat.div_(whole)
            server.set_gradients(used, total)
            return server.mean(losses)

        def update(now: Run) -> None:
            run.update(now)
            server.version += 1

        return replace(
            run,
            gradients=gradients,
            update=update,
            team=replace(run.team, assignment=server),
            state={**run.state, "pushes": server.pushes},
        )


def add(total: list[Tensor], push: Push) -> None:
    """Add a gradient to a sum, by its weight."""
    for place, flat in enumerate(push.flats):
        if place < len(total):
            total[place].add_(flat, alpha=push.weight)
        else:
            total.append(flat.mul_(push.weight))


class OnePartPerRound:
    """Gives every worker one part of the round's batch."""

    def next_part(self, server: AssignmentServer, rank: int) -> tuple[int, int]:
        return server.batch, rank - 1

    def may_go_on(self, server: AssignmentServer, rank: int, kind: int) -> bool:
        return kind == PULL or server.last_push.get(rank) != server.version
