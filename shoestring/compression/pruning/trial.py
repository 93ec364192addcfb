"""Verify a pruned model: it must compute the same as the original in which the removed units are masked.

Both run on the example with perturbed weights, so that none is zero (a norm initialised with zeros would hide any
mistake).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.pruning.layers import Stack, skip_blocks
from shoestring.compression.pruning.prune_edits import PruneEdit, UnitCut, apply_prune_edits
from shoestring.compression.pruning.record import plain_kernels, tensors_in
from shoestring.core.errors import Mistake

TOLERANCE = 1e-5  # relative to the largest number of an output, in float32


class TrialModel:
    """A copy of a model with perturbed weights, and its example input."""

    def __init__(self, model: nn.Module, example: Callable[[nn.Module], Any]) -> None:
        self.model = perturb_weights(model)
        self.example = example
        self.plain = False  # run without torch's fused attention kernel
        outputs = self.run(self.model)
        if not outputs:
            raise Mistake(
                "the forward returns no tensor (or list, dict or dataclass of tensors), so pruning can't be verified: "
                "let it return its outputs"
            )
        if any(not torch.isfinite(one).all() for one in outputs if one.is_floating_point()):
            raise Mistake(
                "the model's output has numbers that are not finite, so pruning can't be verified: "
                "prune a model that works"
            )
        if why := difference(outputs, self.run(self.model)):
            raise Mistake(
                f"the model returns other outputs when it is called again ({why}), so pruning can't be verified: "
                f"make its eval mode deterministic"
            )

    def run(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), plain_kernels() if self.plain else nullcontext():
            torch.manual_seed(0)
            return tensors_in(self.example(model))

    def without_own_kernels(self) -> str:
        """From now on run without torch's fused attention kernel; returns a message if that changes the outputs."""
        before, self.plain = self.run(self.model), True
        return (
            "torch's fused attention kernel returns zeros at padded positions, and pruned attention does not use it: outputs "
            "at padded positions differ"
            if difference(before, self.run(self.model))
            else ""
        )

    def outputs_without(self, cuts: Sequence[UnitCut], skips: Mapping[Stack, Sequence[int]]) -> list[Tensor]:
        """The outputs of the original with removed units and blocks masked."""
        model = mask_units(self.model, cuts)
        with ExitStack() as stack:
            for one, members in skips.items():
                stack.enter_context(skip_blocks(model, one, members))
            return self.run(model)

    def problem(self, wanted: Sequence[Tensor], edits: Sequence[PruneEdit]) -> str:
        """Why the pruned model does not compute the wanted outputs; empty if it does."""
        try:
            found = self.run(apply_prune_edits(self.model, edits))
        except Exception as error:  # a user's forward may fail in any way on unexpected sizes
            return f"the forward fails with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return difference(wanted, found)


def mask_units(model: nn.Module, cuts: Sequence[UnitCut]) -> nn.Module:
    """A copy in which the weights that read removed units are zero."""
    result = copy.deepcopy(model)
    weights = dict([*result.named_parameters(), *result.named_buffers()])
    with torch.no_grad():
        for cut in cuts:
            gone = [unit for unit in range(cut.size) if unit not in set(cut.kept)]
            for place in cut.places:
                if place.weight in cut.readers:
                    weight = weights[place.weight].data
                    weight.unflatten(place.dim, (place.outer, cut.size, place.inner)).index_fill_(
                        place.dim + 1, torch.tensor(gone, device=weight.device, dtype=torch.long), 0
                    )
    return result


def perturb_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy in eval mode with slightly perturbed weights, none of which is zero."""
    result = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in result.parameters():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                spread = float(weight.float().std()) if weight.numel() > 1 else 0.0
                weight.add_(noise * (0.05 * spread + 0.01))
    return result


def difference(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    if [one.shape for one in wanted] != [one.shape for one in found]:
        return "the output has another shape"
    for one, other in zip(wanted, found, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return "outputs of integers differ"
            continue
        most = float(one.abs().max()) if one.numel() else 0.0
        off = float((one - other).abs().max()) if one.numel() else 0.0
        allowed = max(TOLERANCE, 32 * torch.finfo(one.dtype).eps) * max(1.0, most)
        if not off <= allowed:
            return f"outputs differ by {off:.1e}, {allowed:.1e} is allowed"
    return ""
