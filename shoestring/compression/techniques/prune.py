"""Fewer heads, neurons, channels or layers: an ordinary smaller model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.pruning.choose import pruning_for
from shoestring.compression.pruning.cuts import as_json, edited, from_json
from shoestring.compression.pruning.importance import importance
from shoestring.compression.pruning.repair import repair_of
from shoestring.compression.techniques.restructure import Restructure
from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class Prune(Restructure):
    """A share of heads, neurons, channels or layers is removed, the least important first (`structure/importance.py`: what the following
    layer loses when a unit leaves and the others make up for it), and the weights that read what was cut are fitted anew
    (`structure/repair.py`: W' = W M[:, kept] M[kept, kept]^-1, with M the second moment of the inputs).

    Frantar, Alistarh 2022, "Optimal Brain Compression", arXiv 2208.11580; Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than
    One?", arXiv 1905.10650; Molchanov et al. 2019, arXiv 1906.10771. What can't be followed through skips and norms is left alone.
    Measured on MiniLM (cosine, without healing): half of heads and neurons .713 as cut and .877 fitted anew; 34 % of heads and 58 % of
    neurons .891; 3 of 6 layers .730. Healed: half of heads and neurons .947 after 20 minutes on two cores, 3 of 6 layers .946 after 15.
    Alone it damages more than grids of the same size do, so it is for speed, with --heal.

    Costs: more damage than grids of the same size do, and a healing to make good for it.

    Not for: models that only have to be small, not fast: `Quantize` damages far less for the same bytes.
    """

    heads: float = 0.0
    neurons: float = 0.0
    channels: float = 0.0
    layers: float = 0.0
    why: ClassVar[str] = "fewer operations: the model is smaller, and as dense as before"

    def __post_init__(self) -> None:
        shares = (self.heads, self.neurons, self.channels, self.layers)
        if not any(shares) or not all(0 <= one < 1 for one in shares):
            raise Mistake(
                f"Prune(heads={self.heads}, neurons={self.neurons}, channels={self.channels}, layers={self.layers}): give a "
                f"share from 0 to below 1 of one of them at least, such as Prune(heads=0.5)"
            )

    def changed(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        batches, shares = (
            list(study.batches),
            {"heads": self.heads, "neurons": self.neurons, "channels": self.channels, "layers": self.layers},
        )
        scores = importance(study.model, batches, study.forward, layers=bool(self.layers))
        found = pruning_for(study.model, lambda model: study.forward(model, batches[0]), shares, scores=scores)
        repair = repair_of(study.model, found.edits, batches, study.forward)
        return repair.model, {"kind": "structure", "edits": as_json(found.edits)}, (*found.told, *repair.told)


def pruned_again(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """The structure, of a fresh model."""
    for edit in edits:
        model = edited(model, from_json(edit.get("edits")))
    return model
