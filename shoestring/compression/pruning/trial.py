"""Whether a cut model computes what it should: the same as the whole one in which the removed units have no effect.

Both are run on the example with weights that are shaken, so that none is zero (a norm that begins at zero hides every mistake).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.pruning.cuts import Edit, UnitCut, edited
from shoestring.compression.pruning.layers import Stack, skipped
from shoestring.compression.pruning.record import plain_kernels, tensors_in
from shoestring.core.errors import Mistake

TOLERANCE = 1e-5  # of the largest number of an output, in float32


class ShakenModel:
    """A shaken copy of a model, and its example."""

    def __init__(self, model: nn.Module, example: Callable[[nn.Module], Any]) -> None:
        self.model = shaken(model)
        self.example = example
        self.plain = False  # both are run without torch's own kernel for attention
        outputs = self.run(self.model)
        if not outputs:
            raise Mistake(
                "the forward gives no tensor (or list, dict or dataclass of such), and nothing else shows whether "
                "a cut is right: let it give its outputs back"
            )
        if any(not torch.isfinite(one).all() for one in outputs if one.is_floating_point()):
            raise Mistake(
                "the model's output has numbers that are not finite, so nothing shows whether a cut is right: "
                "prune a model that works"
            )
        if why := difference(outputs, self.run(self.model)):
            raise Mistake(
                f"the model gives another output each time ({why}), so nothing shows whether a cut is right: "
                f"make its eval mode repeatable"
            )

    def run(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), plain_kernels() if self.plain else nullcontext():
            torch.manual_seed(0)
            return tensors_in(self.example(model))

    def without_own_kernels(self) -> str:
        """From now on run without torch's own kernel for attention; tells if that changes the outputs."""
        before, self.plain = self.run(self.model), True
        return (
            "torch's own kernel gives zeros at padded positions, and a cut attention does not run in it: what comes out there differs"
            if difference(before, self.run(self.model))
            else ""
        )

    def masked(self, cuts: Sequence[UnitCut], skips: Mapping[Stack, Sequence[int]]) -> list[Tensor]:
        """The outputs without the effect of what is removed."""
        model = masked(self.model, cuts)
        with ExitStack() as stack:
            for one, members in skips.items():
                stack.enter_context(skipped(model, one, members))
            return self.run(model)

    def problem(self, wanted: Sequence[Tensor], edits: Sequence[Edit]) -> str:
        """Why a cut model does not give what is wanted; empty if it does."""
        try:
            found = self.run(edited(self.model, edits))
        except Exception as error:  # a stranger's forward may fail in any way on sizes that it does not expect
            return f"the forward fails with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return difference(wanted, found)


def masked(model: nn.Module, cuts: Sequence[UnitCut]) -> nn.Module:
    """A copy in which weights that read removed units are zero."""
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


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy in eval whose weights are a little different and nowhere zero."""
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
