"""VariationalDropout: every weight has its own noise, whose size is trained; weights that are mostly noise become zero.

    in training    w' = w + sigma e,  e ~ N(0, 1)       log sigma^2 is trained, with a penalty that noise lowers (sparse/variational.py)
    closed         where log alpha = log sigma^2 - log w^2 is 3 or more; the penalty's weight is steered to the scheduled share
    memory         + four copies of the weights and a byte a weight: the noisy weights that a step uses, log sigma^2 and its two moments
    operations     those of the model unchanged (weights with zeros are multiplied like others on dense hardware); a few passes over the
                   weights in every update

At `end` exactly `share` of the weights is zero, and no more noise is drawn. log sigma^2 has an Adam of its own with
`rate`; clipping covers the weights' gradients only. It was not the best choice in any measurement: on Fashion-MNIST an
MLP with 90 % zeros loses 3.2 points of accuracy where `MagnitudePrune` loses 1.5 (benchmarks/compress/sparsity.py, with
noise for every sample). With noise once per batch, as here, 95.1 % of digits are right with 90 % zeros, where
`MagnitudePrune` keeps 96.0 (docs/sparse.md). Not exact, and only used on request. Molchanov, Ashukha, Vetrov 2017,
Variational Dropout Sparsifies Deep Neural Networks, arXiv 1701.05369.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.training.sparse.gated_weights import GatedWeights, gated_run
from shoestring.training.sparse.masked_weights import check_steps, mask_cost, mask_drift
from shoestring.training.sparse.schedule import check_schedule, make_schedule
from shoestring.training.sparse.variational import VARIATIONAL
from shoestring.training.sparse.weights import Units, weights_to_sparsify
from shoestring.training.technique import TrainingTechnique


@dataclass(frozen=True)
class VariationalDropout(TrainingTechnique):
    """Train the size of a noise for every weight, and zero weights that are mostly noise.

    Costs: four copies of the weights and a byte a weight, and a few passes over the weights in every update.

    Not for: the best accuracy at a share of zeros: `MagnitudePrune` loses less; it is here to learn from and compare.
    """

    share: float = 0.9  # share of the weights that are zero at the end
    begin: float = 0.1  # fraction of the steps before the first weight becomes zero
    end: float = 0.7  # fraction of the steps after which masks stay fixed
    every: int = 0  # steps between changes; 0: about a hundred changes
    rate: float = 0.005  # learning rate of the Adam for log sigma^2
    where: str = "*"  # weights or modules to sparsify: names or patterns, joined by |
    skip: str = ""  # weights or modules to leave out of these

    order: ClassVar[int] = 67
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "weights that are mostly noise become zero"
    on_request: ClassVar[bool] = True  # it saves nothing in training

    def __post_init__(self) -> None:
        check_schedule(self.share, self.begin, self.end, self.every)
        if not self.rate > 0:
            raise Mistake(f"VariationalDropout(rate={self.rate}): noise is trained at a rate of more than 0")

    def drift(self, ledger: Ledger) -> float:
        return mask_drift(self.share)

    def cost(self, ledger: Ledger) -> Ledger:
        return mask_cost(ledger, copies=4.0)

    def apply(self, run: Run) -> Run:
        schedule = make_schedule(self.share, check_steps("VariationalDropout", run), self.begin, self.end, self.every)
        weights = weights_to_sparsify(run.model, self.where, self.skip)
        return gated_run(run, GatedWeights(weights, schedule, Units(), VARIATIONAL, self.rate, run.settings.seed))
