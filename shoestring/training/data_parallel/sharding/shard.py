"""Shard: every worker trains on its own samples and owns a part of the optimizer state, gradients and weights (ZeRO,
FSDP).

    stage    a worker holds of w                              sent per step (p: bytes of weights, and as many of gradients)
    1        optimizer state / w                              (w - 1) / w  2 p      gradients to their owners, weights back
    2        and gradients / w                                the same; with n micro-batches (w - 1) / w  (n + 1) p
    3        and weights / w, and those of a block or two     (w - 1) / w  3 p      weights before forward and before backward

Stage 1 keeps a worker's own gradients until the batch's last micro-batch, stage 2 sends those of every micro-batch;
without Accumulate they do the same. The results are those of DataParallel, up to the order of sums. Only elementwise
optimizers can step parts of weights (Adam is one, LAMB and Adafactor are not).
Rajbhandari et al.: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2019, arXiv 1910.02054; Zhao
et al.: PyTorch FSDP, 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.optimization.stepping import StepDivision
from shoestring.core.running.run import Run, weighted_loss
from shoestring.training.data_parallel.data_parallel import (
    Statistics,
    data_parallel_refusal,
    mixed_drift,
    share_of,
    split_exactness,
    with_traffic,
)
from shoestring.training.data_parallel.sharding.sharding import Sharding
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.technique import Owned

STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Shard(GroupTechnique):
    """Divide optimizer state, gradients and weights among the workers (ZeRO, FSDP).

    Costs: the bytes of `DataParallel` with stages 1 and 2, half as many again with stage 3.

    Not for: optimizers that look at whole weights (LAMB, Adafactor, Muon), and slow links with stage 3.
    """

    stage: int = 2  # 1: shard the optimizer state; 2: and gradients; 3: and weights

    order: ClassVar[int] = 60
    exact: ClassVar[bool] = True
    unites: ClassVar[str] = "data"
    divides: ClassVar[StepDivision] = StepDivision.IN_PARTS
    why: ClassVar[str] = "every worker owns a part of the optimizer state, the gradients, the weights"

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise Mistake(
                f"Shard(stage={self.stage!r}): there are the stages 1 (optimizer), 2 (and gradients) and 3 (and weights)"
            )

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Shard, ...]:
        return tuple(map(cls, STAGES))

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.WEIGHTS, Owned.GROUPS})

    def refusal(self, ledger: Ledger) -> str:
        return data_parallel_refusal(ledger) or super().refusal(ledger)

    def exactness(self, ledger: Ledger) -> Exactness:
        return split_exactness(ledger)

    def drift(self, ledger: Ledger) -> float:
        return mixed_drift(ledger)

    def cost(self, ledger: Ledger) -> Ledger:
        world, standing, update = ledger.workers.world, ledger.standing, ledger.update
        share, rest = 1 / world, (world - 1) / world
        gradient, spike = ledger.columns.column("gradient"), ledger.columns.column("spike")
        largest = float(gradient.max(initial=0.0))
        sharing = self.stage > 1 or ledger.pieces == 1
        blocks = ledger.columns.with_changes(
            gradient=gradient * (share if sharing else 1.0), spike=spike + 2 * gradient
        )
        gathered = min(2 * largest, standing.parameters) if self.stage == 3 else 0.0
        reduced = ledger.all_gradients * (ledger.pieces if self.stage > 1 else 1)
        sent = rest * (reduced + standing.parameters * (2 if self.stage == 3 else 1))
        standing = replace(
            standing,
            optimizer=standing.optimizer * share,
            gradients=standing.gradients * (share if self.stage > 1 else 1.0),
            parameters=standing.parameters * share + gathered if self.stage == 3 else standing.parameters,
        )
        update = replace(update, seconds=update.seconds * share, rise=update.rise * share)
        return with_traffic(
            replace(ledger, blocks=blocks, standing=standing, update=update), sent, 3 * len(ledger.blocks)
        )

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        sharding, statistics = Sharding(run, link, self.stage), Statistics(run.model, link)

        def forward(model: nn.Module, batch: Batch) -> Any:
            with sharding.forward():
                return run.forward(model, batch)

        def backward(now: Run, value: Tensor) -> None:
            with sharding.backward(now.last):
                run.backward(now, value)

        def gradients(now: Run, batch: Batch) -> Tensor:
            share = share_of(now, link, batch)
            statistics.begin()
            sharding.gather_outside()
            loss = run.gradients(
                replace(now, loss=lambda output, part: weighted_loss(now.loss(output, part), share())), batch
            )
            sharding.release()
            total, unused = sharding.reducer.tally(loss)
            if now.last:
                unused = sharding.add_up_parts(run.held.shared, unused)
            sharding.set_gradients(unused)
            statistics.average()
            return total

        def update(now: Run) -> None:
            if now.settings.clip:
                sharding.clip(now.settings.clip, now.optimizer)
            now.optimizer.step()
            sharding.gather_weights()

        return replace(
            run,
            forward=forward,
            backward=backward,
            gradients=gradients,
            update=update,
            outside=run.outside.within(sharding.usable, sharding.together),
            held=replace(run.held, shared={}),
            state={**run.state, "shards": sharding},
        )
