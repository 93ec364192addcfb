"""Precision: compute in 16 bits.

    mixed (bf16, fp16)   activations and matrix products in 16 bits; weights, gradients and optimizer state in 32
    full bf16            everything in 16 bits: half of all bytes, and weights are rounded at every update

Relative rounding: bf16 2^-8, fp16 2^-11. fp16 overflows above 65504, so its loss is multiplied by a scale S before
backward and the gradients are divided by it after: on overflow the step is skipped and S halved, after 500 good steps S
doubles.
Micikevicius et al.: Mixed Precision Training, 2018, arXiv 1710.03740; Kalamkar et al.: A Study of BFLOAT16 for Deep
Learning Training, 2019, arXiv 1905.12322.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, map_leaves
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake
from shoestring.core.optimization.stepping import parameter_like
from shoestring.core.private import FakeTensor, own_buffers, own_parameters
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.measure.instructions import deadly, require
from shoestring.training.technique import TrainingTechnique

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision(TrainingTechnique):
    """Compute in bf16 or fp16 instead of float32.

    Costs: accuracy: 8 significant bits with bf16, 11 with fp16. On processors without 16-bit products it costs time
    as well.

    Not for: losses that depend on small differences, CPUs without working 16-bit products (`shoestring doctor`
    tells), or runs that must be exact.
    """

    dtype: str = "bf16"  # "bf16" or "fp16"
    weights: str = "fp32"  # "fp32": master weights; "bf16": the weights themselves, clearly inexact

    order: ClassVar[int] = 10
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "half the bytes per activation, rounded to 8 bits (bf16) or 11 (fp16)"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise Mistake(f"Precision(dtype={self.dtype!r}): there are {', '.join(DTYPES)}")
        if self.weights not in ("fp32", "bf16") or (self.weights == "bf16" and self.dtype != "bf16"):
            raise Mistake(
                f"Precision(dtype={self.dtype!r}, weights={self.weights!r}): weights are fp32, or bf16 with dtype bf16"
            )

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Precision, ...]:
        return tuple(choice for choice in cls.variants() if choice.key in ledger.by_precision)

    @classmethod
    def variants(cls) -> tuple[Precision, ...]:
        return cls("bf16"), cls("fp16"), cls("bf16", "bf16")

    @classmethod
    def settings_to_explain(cls, ledger: Ledger) -> tuple[Precision, ...]:
        return cls.choices(ledger) or (cls(),)

    @property
    def label(self) -> str:
        return f"Precision({self.dtype})"

    @property
    def conflict_names(self) -> tuple[str, ...]:
        return (*super().conflict_names, "Precision(weights)") if self.weights != "fp32" else super().conflict_names

    @property
    def computes_in(self) -> str:
        return self.dtype

    @property
    def key(self) -> str:
        return f"{self.dtype} {self.weights}"

    @property
    def error(self) -> float:
        """Largest relative rounding error of one number."""
        return 2.0**-8 if self.dtype == "bf16" else 2.0**-11

    def refusal(self, ledger: Ledger) -> str:
        broken = f"no {self.dtype}"
        if ledger.has(broken):
            here = f"{self.dtype} products do not work on this machine (shoestring doctor tells)"
            reason = ledger.findings.reasons.get(broken)
            return here if reason is None else f"the model can't compute in {self.dtype}: {reason}"
        return deadly(self.dtype) if ledger.has(f"{self.dtype} is deadly here") else ""

    def drift(self, ledger: Ledger) -> float:
        return 0.1 if self.weights == "bf16" else 0.05 if self.dtype == "bf16" else 0.03

    def cost(self, ledger: Ledger) -> Ledger:
        """The step as measured at this precision; before that measurement, half the activations."""
        if self.key in ledger.by_precision:
            return ledger.by_precision[self.key]
        blocks = tuple(
            replace(block, kept=block.kept / 2, output=block.output / 2, rise=block.rise / 2, spike=block.spike / 2)
            for block in ledger.blocks
        )
        return replace(ledger, blocks=blocks)

    def apply(self, run: Run) -> Run:
        dtype = DTYPES[self.dtype]
        if next(run.model.parameters()).device.type == "cpu":
            require(self.dtype)
        if self.weights == "bf16":
            return in_sixteen_bits(run, dtype)

        def autocast(model: nn.Module) -> torch.autocast:
            return torch.autocast(next(model.parameters()).device.type, dtype=dtype)

        def forward(model: nn.Module, batch: Batch) -> Any:
            with autocast(model):
                return run.forward(model, batch)

        def loss(output: Any, batch: Batch) -> Tensor:
            with autocast(run.model):
                return run.loss(output, batch)

        cast = replace(run, forward=forward, loss=loss)
        return with_loss_scaling(cast) if self.dtype == "fp16" else cast


def in_sixteen_bits(run: Run, dtype: torch.dtype) -> Run:
    """The run with its weights, and the batch's floating-point tensors, in 16 bits."""
    small: dict[nn.Parameter, nn.Parameter] = {}
    for module in run.model.modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is not None and parameter.is_floating_point():
                if parameter not in small:
                    small[parameter] = parameter_like(parameter, parameter.detach().to(dtype))
                own_parameters(module)[name] = small[parameter]
        for name, buffer in list(own_buffers(module).items()):
            if buffer is not None and buffer.is_floating_point():
                own_buffers(module)[name] = buffer.to(dtype)
    for group in run.optimizer.param_groups:
        group["params"] = [small.get(parameter, parameter) for parameter in group["params"]]

    def small_batch(batch: Batch) -> Batch:
        return map_leaves(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
        )

    outside = replace(run.outside, evaluate=lambda model, batch: run.outside.evaluate(model, small_batch(batch)))
    return replace(run, forward=lambda model, batch: run.forward(model, small_batch(batch)), outside=outside)


class LossScale(RunState):
    """The factor on the loss: halved when gradients overflow, doubled when they have not for a while."""

    def __init__(self, scale: float = 2.0**10, patience: int = 500) -> None:
        self.scale, self.patience, self.good, self.skipped = scale, patience, 0, 0

    def advance(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        self.skipped += not finite
        if not finite:
            self.scale = max(self.scale / 2, 2.0**-14)
        elif self.good % self.patience == 0:
            self.scale = min(self.scale * 2, 2.0**24)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def with_loss_scaling(run: Run) -> Run:
    """The run with dynamic loss scaling."""
    scaler = LossScale()

    def gradients(now: Run, batch: Batch) -> Tensor:
        factor = scaler.scale
        return run.gradients(replace(now, loss=lambda output, piece: now.loss(output, piece) * factor), batch) / factor

    def update(now: Run) -> None:
        stepped = (parameter for group in now.optimizer.param_groups for parameter in group["params"])
        found = [
            parameter.grad
            for parameter in dict.fromkeys((*now.model.parameters(), *stepped))
            if parameter.grad is not None
        ]
        finite = all_finite(found)
        if finite:
            for gradient in found:
                gradient.div_(scaler.scale)
            run.update(now)
        scaler.advance(finite)

    return replace(run, gradients=gradients, update=update, state={**run.state, "loss scale": scaler})


def all_finite(gradients: list[Tensor]) -> bool:
    """Whether no gradient overflowed: the sum of a gradient is not finite if any number in it is not. Always true in a
    rehearsal."""
    sums = (gradient.sum().isfinite() for gradient in gradients)
    return all(isinstance(one, FakeTensor) or bool(one) for one in sums)
