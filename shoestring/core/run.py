"""A run: the handful of replaceable parts that the training loop calls."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, moved
from shoestring.core.errors import Mistake
from shoestring.core.job import Job


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: Mapping[str, nn.Module]                     # the model's repeated parts, by name, in the order they run
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]                # a mean over the batch's weight
    weight: Callable[[Batch], float]
    gradients: Callable[[Run, Batch], Tensor]           # adds to every .grad, returns the loss
    update: Callable[[Run], None]                       # moves the weights
    state: Mapping[str, Stateful] = field(default_factory=dict)   # what must survive a restart, beside model and optimizer


def plain_run(job: Job, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Run:
    """The run everybody writes first; the yardstick every technique is compared with."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise Mistake(f"the model {type(model).__name__} has no parameter that requires a gradient: nothing to train")
    device = parameters[0].device

    def gradients(run: Run, batch: Batch) -> Tensor:
        here = moved(batch, device)
        value = run.loss(run.forward(run.model, here), here)
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise Mistake(f"the job's loss gave {found}: it must be one number, the mean over the batch")
        value.backward()
        return value.detach()

    def update(run: Run) -> None:
        if job.clip:
            nn.utils.clip_grad_norm_(parameters, job.clip)
        run.optimizer.step()

    return Run(model, job.optimizer(parameters), blocks, job.forward, job.loss, job.weight, gradients, update)
