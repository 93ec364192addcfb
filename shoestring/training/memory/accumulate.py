"""Accumulate: gradient accumulation. Run the batch in micro-batches (`pieces`), sum their gradients, update once.

    activations  a  ->  a / n            the gradients take memory from the first micro-batch on
    time         t  ->  r(n) t + (n - 1) a    r: small micro-batches use the machine less well (measured for 2 and 8 of them,
                                              lines in between); a: adding one micro-batch's gradients to the sum

The loss is a mean over the batch's weight w (samples, or valid tokens), so a micro-batch counts w_piece / w_batch.
Equal to plain training up to the order of the sum, as long as no layer mixes samples (batch norm does;
training/evidence/trials/pieces.py tries the rest) and none draws random numbers (dropout then draws other masks of the same
distribution).
Huang et al.: GPipe, 2019, arXiv 1811.06965, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.running.run import Run, weighted_loss
from shoestring.training.technique import MIXED, TrainingTechnique


@dataclass(frozen=True)
class Accumulate(TrainingTechnique):
    """Run a batch in pieces and add up their gradients before one update.

    Costs: time: small pieces use the machine less well, and every piece after the first adds its gradients to the
    sum.

    Not for: models with batch norm, which would see a piece at a time, and losses that compare the samples of a
    batch.
    """

    pieces: int  # micro-batches per batch, run one after the other

    order: ClassVar[int] = 20
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    splits_batch: ClassVar[bool] = True
    why: ClassVar[str] = "activations of a part of the batch at a time"

    def __post_init__(self) -> None:
        if self.pieces < 1:
            raise Mistake(f"Accumulate(pieces={self.pieces}): a batch has at least one piece")

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Accumulate, ...]:
        if ledger.pieces > 1:  # another technique splits the batch already
            return ()
        return tuple(cls(pieces) for pieces in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if pieces <= ledger.batch)

    @classmethod
    def easing(cls, samples: int) -> tuple[Accumulate, ...]:
        return tuple(cls(pieces) for pieces in (2, 4, 8, 16, 32) if pieces <= samples)

    @property
    def parts(self) -> int:
        return self.pieces

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has(Trait.UNSPLITTABLE):
            return ledger.findings.reasons.get(Trait.UNSPLITTABLE, "the batch can't be split into samples")
        return (
            f"{self.pieces} pieces of a batch of {ledger.batch} samples: a piece needs a sample"
            if self.pieces > ledger.batch
            else ""
        )

    def exactness(self, ledger: Ledger) -> Exactness:
        if ledger.has(Trait.MIXES_SAMPLES):
            return Exactness.CHANGED
        return Exactness.DISTRIBUTION if ledger.has(Trait.DRAWS) else Exactness.ROUNDING

    def drift(self, ledger: Ledger) -> float:
        return MIXED

    def cost(self, ledger: Ledger) -> Ledger:
        return ledger.in_pieces(self.pieces)

    def pieces_of(self, run: Run, batch: Batch) -> list[Batch]:
        """The batch's micro-batches; in a group, a worker's share may have fewer samples than `pieces`."""
        return run.cuts.pieces(
            batch, min(self.pieces, run.cuts.count(batch)) if run.team.link.world > 1 else self.pieces
        )

    def apply(self, run: Run) -> Run:
        def gradients(now: Run, batch: Batch) -> Tensor:
            whole = float(now.cuts.weight(batch))
            if now.team.link.world > 1:  # a worker whose share of the batch weighs nothing still takes part
                whole = whole or 1.0
            if not whole > 0:
                raise Mistake(f"the batch has the weight {whole}: a mean over nothing; check the job's weight")
            total = torch.zeros(())
            shares = [(piece, float(now.cuts.weight(piece)) / whole) for piece in self.pieces_of(now, batch)]
            if now.team.link.world > 1:  # every worker runs equally many micro-batches, so that all send equally often
                shares += [(shares[0][0], 0.0)] * (self.pieces - len(shares))
            else:
                shares = [(piece, share) for piece, share in shares if share]
            for number, (piece, share) in enumerate(shares, 1):
                part = replace(now, loss=scale_loss(now.loss, share), last=now.last and number == len(shares))
                total = total + run.gradients(part, piece)
            return total

        return replace(run, gradients=gradients, cuts=replace(run.cuts, parts=run.cuts.parts * self.pieces))


def scale_loss(loss: Callable[[Any, Batch], Tensor], share: float) -> Callable[[Any, Batch], Tensor]:
    return lambda output, batch: weighted_loss(loss(output, batch), share)
