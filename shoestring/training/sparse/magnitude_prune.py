"""MagnitudePrune: gradual magnitude pruning. The smallest weights become zero, more and more of them, while the others
are trained.

    share of zeros in step t    s_t = share (1 - (1 - (t - t0) / (t1 - t0))^3)      t0 = begin, t1 = end, as fractions of the steps
    after every update          w_i = 0   of the s_t N smallest |w_i|               they get no gradient and stay zero
    memory                      + a byte a weight (its mask); about four times the weights while masks change
    operations                  unchanged: weights with zeros are multiplied like others on dense hardware, and stay dense in memory

With `amount`, the same share is pruned `every` so many steps. To save bytes, `shoestring compress` stores each zero as
a bit. Not exact: it trains another model. Only used on request. Zhu, Gupta 2017, To prune, or not to prune, arXiv
1710.01878; compared with the others by Gale, Elsen, Hooker 2019, The State of Sparsity in Deep Neural Networks, arXiv
1902.09574, and by benchmarks/compress/sparsity.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.model.masks import zero_masks
from shoestring.core.running.run import Run
from shoestring.training.sparse.masked_weights import MaskedWeights, check_steps, mask_cost, mask_drift, masked_run
from shoestring.training.sparse.schedule import SparsitySchedule, check_schedule, make_schedule
from shoestring.training.sparse.weights import weights_to_sparsify
from shoestring.training.technique import TrainingTechnique

SCOPES = ("all", "layer")


@dataclass(frozen=True)
class MagnitudePrune(TrainingTechnique):
    """Zero the smallest weights, more and more of them, while the others are trained.

    Costs: a byte a weight for the mask, about four times the weights while masks change, and no operation less: zeros
    are multiplied like other numbers.

    Not for: saving memory or time in training; it prepares a model that `shoestring compress` then stores in fewer
    bytes.
    """

    share: float = 0.9  # share of the weights that are zero at the end
    begin: float = 0.1  # fraction of the steps before the first weight becomes zero
    end: float = 0.7  # fraction of the steps after which masks stay fixed
    every: int = 0  # steps between changes; 0: about a hundred changes
    scope: str = "all"  # "all": the share is of all weights together; "layer": of each layer
    amount: float = 0.0  # share pruned each time: 0.05 with every=200 prunes 5 % every 200 steps; 0: the cubic schedule
    amount_of: str = "all"  # `amount` is a share of "all" original weights, or of those "left"
    where: str = "*"  # weights or modules to prune: names or patterns, joined by |
    skip: str = ""  # weights or modules to leave out of these

    order: ClassVar[int] = 66
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "the smallest weights become zero while the others are trained"
    on_request: ClassVar[bool] = True  # it saves nothing in training

    def __post_init__(self) -> None:
        check_schedule(self.share, self.begin, self.end, self.every, self.amount, self.amount_of)
        if self.scope not in SCOPES:
            raise Mistake(f"MagnitudePrune(scope={self.scope!r}): there are {', '.join(SCOPES)}")

    def drift(self, ledger: Ledger) -> float:
        return mask_drift(self.share)

    def cost(self, ledger: Ledger) -> Ledger:
        return mask_cost(ledger)

    def apply(self, run: Run) -> Run:
        steps = check_steps("MagnitudePrune", run)
        schedule = make_schedule(self.share, steps, self.begin, self.end, self.every, self.amount, self.amount_of)
        weights = weights_to_sparsify(run.model, self.where, self.skip)
        return masked_run(run, SmallestWeights(weights, schedule, each=self.scope == "layer"))


class SmallestWeights(MaskedWeights):
    def __init__(self, weights: Mapping[str, nn.Parameter], schedule: SparsitySchedule, each: bool) -> None:
        super().__init__(weights, schedule)
        self.each = each

    def new_masks(self, share: float) -> Sequence[Tensor]:
        """Numbers that are zero already are pruned before all others."""
        scores = [weight.detach().abs().masked_fill_(self.masks[name], -1) for name, weight in self.weights.items()]
        return zero_masks(scores, share, self.each)
