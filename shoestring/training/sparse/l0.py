"""L0: gates on weights, trained with a penalty on the number of open gates; weights behind closed gates are zero.

    in training    w' = w z    z in [0, 1], 0 or 1 with a probability that is trained (training/sparse/hard_concrete.py)
    loss           + lambda / n sum_i P(z_i != 0)      lambda is steered so that the scheduled share of the n gates closes
    memory         + a copy of the weights (the gated ones that a step uses), and per unit a gate with two moments: with
                   of="numbers" four copies of the weights and a byte a weight; with rows, columns or matrices one copy
    operations     those of the model unchanged (weights with zeros are multiplied like others on dense hardware); a few passes over the
                   weights in every update

`of="columns"` closes inputs of a layer, and with them the units that produce these: neurons, in an MLP's second layer;
heads, in an attention's output projection with `group=` the width of a head. `of="matrices"` closes whole weights, and so
whole layers of a residual network. `share` counts gates: at `end`, exactly that share is closed, and the others are
merged into the weights. The gates have an Adam of their own with `rate`; clipping covers the weights' gradients only.
Not exact, and only used on request. Seldom the best choice: on Fashion-MNIST an MLP with 90 % zeros loses 2.1 points of
accuracy where `MagnitudePrune` loses 1.5 (benchmarks/compress/sparsity.py, one draw per batch). Louizos, Welling,
Kingma 2018, Learning Sparse Neural Networks through L0 Regularization, arXiv 1712.01312.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.training.sparse.gated_weights import GatedWeights, gated_run
from shoestring.training.sparse.hard_concrete import HARD_CONCRETE
from shoestring.training.sparse.masked_weights import check_steps, mask_cost, mask_drift
from shoestring.training.sparse.schedule import check_schedule, make_schedule
from shoestring.training.sparse.weights import Units, weights_to_sparsify
from shoestring.training.technique import TrainingTechnique


@dataclass(frozen=True)
class L0(TrainingTechnique):
    """Train gates that close weights, neurons, heads or whole layers, with a penalty on open ones.

    Costs: up to four copies of the weights and a byte a weight (one copy where gates are of rows, columns or matrices),
    and a few passes over the weights in every update.

    Not for: trainings of tens of steps, in which gates do not close by themselves, or the best accuracy at a share of
    zeros: `MagnitudePrune` loses less.
    """

    share: float = 0.9  # share of the gates that are closed at the end
    begin: float = 0.1  # fraction of the steps before the first weight becomes zero
    end: float = 0.7  # fraction of the steps after which masks stay fixed
    every: int = 0  # steps between changes; 0: about a hundred changes
    of: str = "numbers"  # what has a gate of its own: numbers, rows, columns or matrices
    group: int = 1  # neighbouring columns that share a gate, such as those of an attention head
    rate: float = 0.1  # learning rate of the gates' Adam
    where: str = "*"  # weights or modules to sparsify: names or patterns, joined by |
    skip: str = ""  # weights or modules to leave out of these

    order: ClassVar[int] = 67
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "weights learn which of them can be zero, behind gates with a penalty"
    on_request: ClassVar[bool] = True  # it saves nothing in training

    def __post_init__(self) -> None:
        check_schedule(self.share, self.begin, self.end, self.every)
        Units(self.of, self.group)
        if not self.rate > 0:
            raise Mistake(f"L0(rate={self.rate}): gates move at a rate of more than 0")

    def drift(self, ledger: Ledger) -> float:
        return mask_drift(self.share)

    def cost(self, ledger: Ledger) -> Ledger:
        return mask_cost(ledger, copies=4.0 if self.of == "numbers" else 1.0)

    def apply(self, run: Run) -> Run:
        schedule = make_schedule(self.share, check_steps("L0", run), self.begin, self.end, self.every)
        weights = weights_to_sparsify(run.model, self.where, self.skip)
        units = Units(self.of, self.group)
        return gated_run(run, GatedWeights(weights, schedule, units, HARD_CONCRETE, self.rate, run.settings.seed))
