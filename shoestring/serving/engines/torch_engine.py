"""The job's own module, in eval mode and without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoestring.compression.formats.packed_modules import formats_of
from shoestring.compression.onnx.interface import Forward
from shoestring.core.errors import Mistake
from shoestring.serving.engines.attention import Unpackable
from shoestring.serving.engines.comparison import ROUNDING, difference, references
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.engines.outputs import Compute, answers_alone
from shoestring.serving.engines.packing import packed_answers
from shoestring.serving.engines.packing_trial import try_packing
from shoestring.serving.engines.shared_weights import share_weights
from shoestring.serving.engines.signature import ModelInterface, torch_compute
from shoestring.serving.engines.together import Together, compute_answers, way_together
from shoestring.serving.sample import Answers, Sample


class TorchEngine(ServingEngine):
    """A module, which may compute from packed weights. Its weights move to shared memory.

    Samples of any lengths may be given together, also where it does not pack: then it pads them if answers stay what they
    are alone, and computes those of equal lengths together otherwise.
    """

    def __init__(self, model: nn.Module, forward: Forward, interface: ModelInterface, *, pack: bool = True) -> None:
        self.model = model.eval().requires_grad_(False)
        share_weights(self.model)
        self.compute = torch_compute(self.model, forward)
        with torch.inference_mode():
            self.tolerance = tolerance_of(self.model, interface)
            check_repeats(self.model, self.compute, interface, self.tolerance)
            seen = references(self.compute, interface)
            believed = way_together(self.compute, interface, seen, self.tolerance, self.model)
            self.together, self.interface, self.why_not_padded = believed.together, believed.interface, believed.why
            self.packing, self.why_not_packed = None, "packing was not asked for"
            if believed.together is Together.ALONE:
                self.why_not_packed = believed.why
            elif pack:
                tried = try_packing(self.model, self.compute, self.interface, seen, self.tolerance)
                self.packing, self.why_not_packed = tried.packing, tried.why_not
        self.packs = self.packing is not None
        self.signature, self.known = self.interface.signature, self.interface.samples[0]

    @torch.inference_mode()
    def answers(self, samples: Sequence[Sample]) -> Answers:
        if not samples:
            return []
        if self.packing is not None:
            try:
                return packed_answers(self.compute, self.interface, self.packing, samples)
            except Unpackable:  # something that did not occur when packing was tried: right, and slower
                pass
        return compute_answers(self.compute, self.interface, self.together, samples)


def tolerance_of(model: nn.Module, interface: ModelInterface) -> float:
    """What rounding may change, by the coarsest dtype that the model computes in."""
    forms = formats_of(model).values()
    stored = {id(one) for form in forms for one in form.buffers()}  # not what is computed in: scales in float16
    dtypes = {one.dtype for one in (*model.parameters(), *model.buffers()) if id(one) not in stored}
    dtypes |= {form.dtype for form in forms} | {getattr(torch, form.dtype) for form in interface.outputs}
    return max(ROUNDING.get(dtype, 0.0) for dtype in (*dtypes, torch.float64))


def check_repeats(model: nn.Module, compute: Compute, interface: ModelInterface, tolerance: float) -> None:
    """Refuse a model that says something else each time, or whose forward leaves parts of it in training mode."""
    inputs, sample = interface.inputs, interface.samples[-1]
    first, second = (answers_alone(compute, inputs, interface.outputs, [sample])[0] for _ in range(2))
    if left := [name or "the model" for name, module in model.named_modules() if module.training]:
        raise Mistake(
            f"the job's forward puts {left[0]} into training mode: dropout and batch norm would answer by chance, or by what "
            f"else is in the batch; call no train() in it"
        )
    if not (differs := difference(first, second)) <= tolerance:
        raise Mistake(
            f"the model answers the same sample differently each time (by {differs:.1e}) though it is in eval mode: if it calls "
            f"dropout as a function, give it training=self.training; if it draws numbers, take them from the sample"
        )
