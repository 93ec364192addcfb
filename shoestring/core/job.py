"""A job: what the user wants trained. A job file is plain Python with one function `job(...) -> Job`."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, samples
from shoestring.core.errors import Mistake
from shoestring.core.feed import Feed
from shoestring.core.link import ALONE, Link


def default_forward(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def default_loss(output: Any, batch: Batch) -> Tensor:
    """The loss a model brings along (`output.loss`, as in transformers), else cross entropy with batch[1]."""
    brought: Tensor | None = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if brought is not None:
        return brought
    if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(output, Tensor):
        return nn.functional.cross_entropy(output, batch[1])
    raise Mistake("the job gives no loss, the model's output has none and the batch is not an (input, target) pair: "
                  "add loss=lambda output, batch: ... to the Job")


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Origin:
    """Where a job came from, so that another process can make it again."""

    file: str                         # path of the job file
    flags: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Job:
    model: Callable[[], nn.Module]                       # a factory: planning builds it without memory
    data: Callable[[], Any]                              # a factory of batches, or of a map-style Dataset
    loss: Callable[[Any, Batch], Tensor] = default_loss
    forward: Callable[[nn.Module, Batch], Any] = default_forward
    weight: Callable[[Batch], float] = samples           # what the loss is a mean over
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = default_optimizer
    batch: int = 8                                       # samples per step, used when data is a Dataset
    steps: int = 100
    seed: int = 0
    clip: float = 0.0                                    # largest global norm of the gradients; 0: no clipping
    weights: str = ""                                    # a safetensors file that the model begins from
    show: Callable[[nn.Module], str] | None = None       # something to look at after training
    origin: Origin | None = None                         # set when the job was read from a file
    link: Link = ALONE                                   # set where its batches are split between workers

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("steps", 1), ("clip", 0)):
            if getattr(self, name) < least:
                raise Mistake(f"{name}={getattr(self, name)} in the Job: give {least} or more")

    def batches(self) -> Feed:
        """The job's batches, as long as they last; a Dataset is shuffled by the job's seed and goes round for ever."""
        return Feed(self)
