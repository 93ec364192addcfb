"""RandomPrune: random weights, drawn from a seed, become zero: the baseline for MagnitudePrune, L0 and
VariationalDropout.

    z_i = SplitMix64(seed, i)      the s_t n lowest z_i of each weight's n numbers are zero in step t, on the cubic schedule

Never the best choice: on Fashion-MNIST an MLP with 90 % zeros loses 5.9 points of accuracy where `MagnitudePrune` loses
1.5, with 98 % 32.7 points where it loses 4.4 (benchmarks/compress/sparsity.py). A mask follows from its seed, so it can
be stored in 8 bytes. Memory and operations are those of MagnitudePrune. Not exact, and only used on request. Gale,
Elsen, Hooker 2019, The State of Sparsity in Deep Neural Networks, arXiv 1902.09574.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from shoestring.core.costs.ledger import Ledger
from shoestring.core.model.masks import lowest, seed_of, seed_scores, zeros_of
from shoestring.core.running.run import Run
from shoestring.training.sparse.masked_weights import MaskedWeights, check_steps, mask_cost, mask_drift, masked_run
from shoestring.training.sparse.schedule import SparsitySchedule, check_schedule, make_schedule
from shoestring.training.sparse.weights import weights_to_sparsify
from shoestring.training.technique import TrainingTechnique


@dataclass(frozen=True)
class RandomPrune(TrainingTechnique):
    """Zero weights that a seed draws: the baseline for the other three.

    Costs: as much as `MagnitudePrune`.

    Not for: a model that anybody uses: at the same share of zeros it loses more accuracy than magnitudes do.
    """

    share: float = 0.9  # share of each weight's numbers that are zero at the end
    begin: float = 0.1  # fraction of the steps before the first weight becomes zero
    end: float = 0.7  # fraction of the steps after which masks stay fixed
    every: int = 0  # steps between changes; 0: about a hundred changes
    seed: int = -1  # determines the masks, together with the weights' names; -1: the job's seed
    where: str = "*"  # weights or modules to prune: names or patterns, joined by |
    skip: str = ""  # weights or modules to leave out of these

    order: ClassVar[int] = 66
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "weights that a seed draws become zero: a baseline"
    on_request: ClassVar[bool] = True  # a baseline

    def __post_init__(self) -> None:
        check_schedule(self.share, self.begin, self.end, self.every)

    def drift(self, ledger: Ledger) -> float:
        return mask_drift(self.share)

    def cost(self, ledger: Ledger) -> Ledger:
        return mask_cost(ledger)

    def apply(self, run: Run) -> Run:
        schedule = make_schedule(self.share, check_steps("RandomPrune", run), self.begin, self.end, self.every)
        weights = weights_to_sparsify(run.model, self.where, self.skip)
        return masked_run(run, DrawnWeights(weights, schedule, run.settings.seed if self.seed < 0 else self.seed))


class DrawnWeights(MaskedWeights):
    def __init__(self, weights: Mapping[str, nn.Parameter], schedule: SparsitySchedule, seed: int) -> None:
        super().__init__(weights, schedule)
        self.seed = seed

    def new_masks(self, share: float) -> Sequence[Tensor]:
        return [
            lowest(seed_scores(mask.numel(), seed_of(self.seed, name)), zeros_of(mask.numel(), share)).view(mask.shape)
            for name, mask in self.masks.items()
        ]
