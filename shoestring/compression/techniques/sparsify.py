"""Unstructured pruning: single weights become zero, and the others are stored behind a bitmap."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.formats.sparse import seeded_mask
from shoestring.compression.technique import ZEROS, ModelCost
from shoestring.compression.techniques.restructure import DeriveModel
from shoestring.core.errors import Mistake

FASTER = 0.9  # share of zeros from which on sparse products are faster than dense ones on CPUs
WAYS = ("magnitude", "random")


@dataclass(frozen=True)
class Sparsify(DeriveModel):
    """Set a share of every matrix to zero: the numbers with the smallest |w_ij| sqrt(M_jj), where M_jj is the mean
    square of the input that w_ij is multiplied with (Sun et al. 2024, "Wanda", arXiv 2306.11695; |w_ij| alone if M is
    unknown), or random ones drawn from a seed. The other numbers are stored behind a bitmap of one bit per number; a
    random mask is stored as its seed.

    To prune weights during training, see docs/sparse.md.

    Costs: a bit for every number, and time: packed weights are decoded in every call.

    Not for: speed: below very high shares of zeros, a CPU multiplies dense matrices faster.
    """

    share: float = 0.5  # fraction of the numbers that become zero
    by: str = "magnitude"  # or "random": the baseline
    seed: int = 0  # of the random numbers
    why: ClassVar[str] = "zeros take a bit"
    seam: ClassVar[str] = "zeros"
    order: ClassVar[int] = ZEROS

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise Mistake(f"Sparsify(by={self.by!r}): there are {', '.join(WAYS)}")
        if not 0 < self.share < 1:
            raise Mistake(f"Sparsify(share={self.share}): give a share between 0 and 1")

    def refusal(self, cost: ModelCost, /) -> str:
        if cost.wanted.latency is not None and self.share < FASTER:
            return (
                f"zeros here and there make nothing faster below {FASTER:.0%}: a CPU multiplies dense matrices faster than sparse ones "
                f"of {self.share:.0%} zeros; use Prune, which leaves smaller dense ones, or leave --latency out"
            )
        return super().refusal(cost)

    def derive(self, study: Calibration) -> Calibration:
        model = copy.deepcopy(study.model)
        values, masks = dict(model.named_parameters(remove_duplicate=False)), self.masks(study)
        if not masks:
            raise Mistake("the model has no weight with rows and columns: there is nothing to set to zero")
        with torch.no_grad():
            for name, mask in masks.items():
                values[name].mul_(mask)
        return Calibration(
            model,
            study.forward,
            study.batches,
            study.others,
            study.measures,
            study.sample,
            masks=masks,
            notes=study.notes,
            seed=self.seed if self.by == "random" else None,
            original=study.original if study.original is not None else study.model,
        )

    def masks(self, study: Calibration) -> dict[str, Tensor]:
        found = {}
        for weight in study.weights:
            if not weight.is_matrix:
                continue
            kept = weight.count - int(self.share * weight.count)
            if self.by == "random":
                found[weight.name] = seeded_mask(weight.shape, kept, self.seed)
                continue
            size = study.values[weight.name].abs()
            importance = study.importance(weight)
            if importance is not None:
                size = (size.reshape(len(size), -1) * importance.sqrt()).reshape(weight.shape)
            mask = torch.zeros(weight.count, dtype=torch.bool)
            mask[size.reshape(-1).topk(kept).indices] = True
            found[weight.name] = mask.reshape(weight.shape)
        return found
