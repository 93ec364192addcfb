"""OffloadOptimizer: keep the optimizer's moments on disk, or in host memory beside a GPU, and stream them through the
update.

    moments   sum_i m_i  ->  a few chunks, and those of small parameters
    traffic   + 2 sum m_i per step
    time      update  ->  max(update, traffic / disk speed): chunks are read ahead and written behind

With StepInBackward a block's update overlaps the previous block's backward. Beside a GPU the update runs on the host,
with its fused kernel, and only gradients and weights cross the bus.
Exact: the same optimizer sees the same numbers. Ren et al.: ZeRO-Offload, 2021, arXiv 2101.06840.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Traffic, Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.optimization.stepping import StepDivision, only, parameter_like
from shoestring.core.running.run import Run
from shoestring.training.memory.offload.disk_store import DiskStore, OnDisk
from shoestring.training.memory.offload.offloaded_optimizer import (
    BUFFERS,
    CHUNK,
    SMALL,
    OffloadedOptimizer,
    OptimizerProxy,
    in_parts,
    offload_refusal,
)
from shoestring.training.memory.optimizers import eight_bits
from shoestring.training.technique import TrainingTechnique

PLACES = ("disk", "host")
BLOCK = (
    16 << 20
)  # numbers per optimizer call in host memory; with a quarter of that, call overhead takes a tenth of the time


@dataclass(frozen=True)
class OffloadOptimizer(TrainingTechnique):
    """Keep the optimizer's state on disk, or in host memory beside a GPU.

    Costs: every moment is read and written once a step, and disk space for two copies of them.

    Not for: optimizers without state, such as plain SGD, and steps that are too short to hide the traffic.
    """

    to: str = "disk"
    moments: str = ""  # "8bit": moments in 8 bits, which is not exact

    order: ClassVar[int] = 47
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    divides: ClassVar[StepDivision] = StepDivision.IN_TURNS
    why: ClassVar[str] = "the optimizer's moments wait on disk, not in memory"

    def __post_init__(self) -> None:
        if self.to not in PLACES or self.moments not in ("", "8bit") or (self.moments and self.to == "host"):
            raise Mistake(
                f"OffloadOptimizer(to={self.to!r}, moments={self.moments!r}): there are to='disk' and 'host', and on disk "
                f"moments='8bit' or none"
            )

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[OffloadOptimizer, ...]:
        return (*(cls(to) for to in PLACES), cls(moments="8bit"))

    @property
    def label(self) -> str:
        return f"OffloadOptimizer({self.to})"

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.CHANGED if self.moments else Exactness.BITS

    def drift(self, ledger: Ledger) -> float:
        return eight_bits.DRIFT

    def refusal(self, ledger: Ledger) -> str:
        if reason := super().refusal(ledger):
            return reason
        if self.to == "host":
            return "" if ledger.has(Trait.ON_A_GPU) else "there is no GPU: the moments are in host memory already"
        if not ledger.standing.optimizer:
            return "the optimizer keeps no moments"
        if reason := offload_refusal(ledger, bool(self.moments)):
            return reason
        return "" if ledger.has(Trait.OWN_PROCESS) else "state on disk needs a run of its own: use a job file"

    def cost(self, ledger: Ledger) -> Ledger:
        moments, parameters, machine = ledger.standing.optimizer, ledger.standing.parameters, ledger.machine
        share = moments / parameters if parameters else 0.0
        buffers = BUFFERS * min(4.0 * CHUNK, max((block.gradient for block in ledger.blocks), default=0.0)) * share
        traffic = 2 * moments * (eight_bits.SHARE if self.moments else 1.0)
        moving, copying = traffic * machine.per_byte_streamed, traffic * machine.per_byte_moved / machine.cores
        copied = ledger.traffic + Traffic(disk=traffic, disk_seconds=moving, waiting=copying)
        return replace(
            ledger,
            standing=replace(ledger.standing, optimizer=min(buffers, moments)),
            traffic=copied + Traffic(waiting=max(moving - ledger.update.seconds, 0.0)),
        )

    def apply(self, run: Run) -> Run:
        if self.to == "host":
            return replace(run, optimizer=cast(torch.optim.Optimizer, HostOptimizer(run.optimizer)))
        names = {parameter: name for name, parameter in run.model.named_parameters()}
        large = {
            parameter: names[parameter]
            for group in run.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and parameter in names and parameter.numel() >= SMALL
        }
        kind = next(run.model.parameters()).data.new_empty(0)
        store = DiskStore(run.settings.file("moments.bin"), kind)
        offloaded = OffloadedOptimizer(run.optimizer, store, large, in_parts(run), coded=bool(self.moments))
        store.open()

        def gradients(now: Run, batch: Batch) -> Tensor:
            offloaded.begin_step()
            return run.gradients(now, batch)

        return replace(
            run,
            optimizer=cast(torch.optim.Optimizer, offloaded),
            gradients=gradients,
            state={**run.state, "moments": MomentsOnDisk(offloaded)},
        )


class HostOptimizer(OptimizerProxy):
    """An optimizer whose moments are in host memory and whose update runs there."""

    @torch.no_grad()
    def step(self) -> None:
        if all(self.here(one) for group in self.optimizer.param_groups for one in group["params"]):
            self.optimizer.step()  # the model is on the CPU: nothing to move
        else:
            self.step_in_blocks()

    @torch.no_grad()
    def step_in_blocks(self) -> None:
        """Step groups of parameters that are large enough to be worth an optimizer call."""
        for group in list(self.optimizer.param_groups):
            block: list[nn.Parameter] = []
            numbers = 0
            for parameter in [one for one in group["params"] if one.grad is not None]:
                block.append(parameter)
                numbers += parameter.numel()
                if numbers >= BLOCK:
                    self.step_block(block, group)
                    block, numbers = [], 0
            if block:
                self.step_block(block, group)

    def step_block(self, block: list[nn.Parameter], group: dict[str, Any]) -> None:
        away = {one: self.fetch(one) for one in block if not self.here(one)}
        with only(self.optimizer, [away.get(one, one) for one in block], group):
            self.optimizer.step()
        for one, copy in away.items():
            self.optimizer.state[one] = self.optimizer.state.pop(copy, {})
            one.copy_(copy)

    def here(self, parameter: nn.Parameter) -> bool:
        return parameter.device.type == "cpu"

    def fetch(self, parameter: nn.Parameter) -> nn.Parameter:
        """A parameter with its gradient and state, copied to host memory."""
        copy = parameter_like(parameter, parameter.detach().to("cpu"))
        copy.grad = parameter.grad.to("cpu") if parameter.grad is not None else None
        state = {
            name: value.to("cpu") if isinstance(value, Tensor) else value
            for name, value in self.optimizer.state[parameter].items()
        }
        if state:
            self.optimizer.state[copy] = state
        return copy


class MomentsOnDisk(OnDisk):
    """The moments on disk, as run state."""

    def __init__(self, offloaded: OffloadedOptimizer) -> None:
        self.store = offloaded.store
        self.ring = offloaded.ring

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer.bytes for buffer in self.ring.buffers] if self.ring else []
