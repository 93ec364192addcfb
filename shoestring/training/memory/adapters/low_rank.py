"""LowRank (LoRA): freeze the weights and train small low-rank updates of them.

    weight       W  ->  W + alpha / rank  B A        A: rank x in, random from the job's seed; B: out x rank, zero, so training begins at W
    trained      in x out numbers  ->  rank (in + out)
    gradients, moments    only for A, B and the weights that `also` names
    backward     no matrix product for the gradient of W: about half of its operations

A and B replace W in the job's optimizer: they join W's parameter group, with its rate and decay (the first group if W
is in none).
The model is not changed: during a step, or while the model is usable, the modules' forward adds the update. Not exact:
it trains other parameters.
Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv 2106.09685.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, ClassVar

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Block, Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.training.memory.adapters.adapters import Adapters
from shoestring.training.technique import Owned, TrainingTechnique

SQUARES = 12  # assumed square weights per block, as in a transformer; only ranks plans before they are rehearsed


@dataclass(frozen=True)
class LowRank(TrainingTechnique):
    """Train a low-rank update of each linear layer and leave the layer's own weight alone (LoRA).

    Costs: a little time in every forward for the two thin products; the model can learn less than with all its
    weights.

    Not for: training from scratch, or tasks far from what the model was pretrained on: the update has too few
    directions for them.
    """

    rank: int = 8
    where: str = "*"  # modules whose weight gets an update: names or patterns, such as "*.q_proj|*.v_proj"
    also: str = ""  # weights trained in full: names or patterns, joined by |, such as "classifier"
    alpha: float = 0.0  # the update is scaled by alpha / rank; 0: alpha = rank

    order: ClassVar[int] = 5
    exact: ClassVar[bool] = False
    saves_memory: ClassVar[bool] = True
    why: ClassVar[str] = "small updates of frozen weights are trained, so most weights need no gradient and no moments"
    on_request: ClassVar[bool] = True  # it trains other parameters

    def __post_init__(self) -> None:
        for name in ("where", "also"):
            given = getattr(self, name)
            object.__setattr__(self, name, given if isinstance(given, str) else "|".join(given))
        if self.rank < 1 or self.alpha < 0 or not self.where:
            raise Mistake(
                f"LowRank(rank={self.rank!r}, where={self.where!r}, alpha={self.alpha!r}): the rank is a number from 1 on, where "
                f"is a pattern of names, and alpha is not negative"
            )

    @classmethod
    def settings_to_explain(cls, ledger: Ledger) -> tuple[LowRank, ...]:
        return ()

    @property
    def scale(self) -> float:
        return (self.alpha or self.rank) / self.rank

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.TRAINED, Owned.GROUPS, Owned.STATE})

    def drift(self, ledger: Ledger) -> float:
        """1: a frozen weight is as far from the plainly trained one as training would have moved it. The updates' own
        error grows with their scale."""
        return 1.0 + self.scale

    def cost(self, ledger: Ledger) -> Ledger:
        """An estimate for ranking: only a rehearsal tells the exact size of the updates."""
        blocks = tuple(self.cost_of_block(block) for block in ledger.blocks)
        before, after = ledger.block_gradients, sum(block.gradient for block in blocks)
        share = min(after / before, 1.0) if before else 1.0
        standing = replace(
            ledger.standing,
            parameters=ledger.standing.parameters + after,
            optimizer=ledger.standing.optimizer * share,
            gradients=ledger.standing.gradients * share,
        )
        update = replace(
            ledger.update,
            seconds=ledger.update.seconds * share,
            rise=ledger.update.rise * share,
            fused_seconds=None if ledger.update.fused_seconds is None else ledger.update.fused_seconds * share,
        )
        splitting = replace(ledger.splitting, adding_seconds=ledger.splitting.adding_seconds * share)
        return replace(
            ledger,
            blocks=blocks,
            standing=standing,
            update=update,
            splitting=splitting,
            by_precision={name: self.cost(one) for name, one in ledger.by_precision.items()},
        )

    def cost_of_block(self, block: Block) -> Block:
        if block.gradient <= 0:
            return block
        width = sqrt(block.gradient / 4 / SQUARES)
        share = min(2 * self.rank / max(width, 1.0), 1.0)
        less = block.gradient * (1 - share)
        return block.with_changes(
            gradient=block.gradient * share,
            spike=max(block.spike - less, 0.0),
            forward=block.forward * (1 + share / 2),
            backward=block.backward * (0.5 + share / 2),
            flops=block.flops * (1 + share / 2),
            backward_flops=block.backward_flops * (0.5 + share / 2),
        )

    def apply(self, run: Run) -> Run:
        adapters = Adapters(run, self.rank, self.where, self.also, self.alpha or self.rank)

        def forward(model: nn.Module, batch: Batch) -> Any:
            with adapters.watching("training"):
                return run.forward(model, batch)

        def gradients(now: Run, batch: Batch) -> Tensor:
            with adapters.adding_updates():  # in backward too, where blocks may be recomputed
                return run.gradients(now, batch)

        def update(now: Run) -> None:
            if now.settings.clip:
                now.noted.note_norm(nn.utils.clip_grad_norm_(adapters.trainable, now.settings.clip))
            run.update(replace(now, settings=replace(now.settings, clip=0.0)))

        return replace(
            run,
            forward=forward,
            gradients=gradients,
            update=update,
            outside=replace(run.outside, usable=adapters.usable(run.outside.usable)),
            state={**run.state, "low rank": adapters},
        )
