"""A job: what the user wants trained. A job file is plain Python with one function `job(...) -> Job`."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.link import Link
from shoestring.core.mesh import Mesh, on_one_axis


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


class Sampler(Protocol):
    """Chooses the samples of a map-style Dataset that make a batch; `data/samplers.py` has some."""

    @property
    def fills_batches(self) -> bool: ...                          # every batch has as many samples as the job asks for
    def refusal(self, count: int, size: int) -> str: ...          # why it can't make batches of `size` of `count` samples; empty: it can
    # The samples' numbers, of every batch from number `begin` on, for ever; they follow from the seed
    def batches(self, count: int, size: int, seed: int, begin: int) -> Iterator[list[int]]: ...


@dataclass(frozen=True)
class Job:
    model: Callable[[], nn.Module]                       # a factory: planning builds it without memory
    data: Callable[[], Any]                              # a factory of batches, or of a map-style Dataset
    loss: Callable[[Any, Batch], Tensor] = default_loss
    forward: Callable[[nn.Module, Batch], Any] = default_forward
    weight: Callable[[Batch], float] = samples           # what the loss is a mean over
    # split(batch, n): the batch as a list of n batches whose weights add up to its own. For batches that can't be cut along the first
    # dimension of their tensors, such as graphs; `weight` must be given with it
    split: Callable[[Batch, int], Sequence[Batch]] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = default_optimizer
    batch: int = 8                                       # samples per step, used when data is a Dataset
    sampler: Sampler | None = None                       # which samples of a Dataset make a batch; None: shuffled, every one once a round
    steps: int = 100
    seed: int = 0
    clip: float = 0.0                                    # largest global norm of the gradients; 0: no clipping
    weights: str = ""                                    # a safetensors file that the model begins from
    show: Callable[[nn.Module], str] | None = None       # something to look at after training
    origin: Origin | None = None                         # set when the job was read from a file
    mesh: Mesh = field(default_factory=on_one_axis)      # set where several workers train it

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("steps", 1), ("clip", 0)):
            if getattr(self, name) < least:
                raise Mistake(f"{name}={getattr(self, name)} in the Job: give {least} or more")

    @property
    def link(self) -> Link:
        """To all workers."""
        return self.mesh.link

    def count(self, batch: Batch) -> int:
        """How much there is to split in a batch: samples, or what its weight counts where the job splits it itself."""
        return samples(batch) if self.split is None else max(int(self.weight(batch)), 1)

    def pieces(self, batch: Batch, count: int) -> list[Batch]:
        """A batch in so many pieces."""
        return split(batch, count) if self.split is None else checked(self.split, self.weight, batch, count)


def checked(own: Callable[[Batch, int], Sequence[Batch]], weight: Callable[[Batch], float], batch: Batch, count: int) -> list[Batch]:
    """The pieces that a job's own split gives, if they are the batch."""
    try:
        found = own(batch, count)
    except Exception as error:
        raise Mistake(f"the job's split failed for {count} pieces: {type(error).__name__}: {error}") from error
    if not isinstance(found, (list, tuple)) or len(found) != count:
        gave = f"{len(found)} of them" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise Mistake(f"the job's split was asked for {count} pieces of a batch and gave {gave}: it must give a list of as many batches")
    whole, parts = float(weight(batch)), sum(float(weight(piece)) for piece in found)
    if abs(whole - parts) > 1e-6 * max(abs(whole), abs(parts)):
        raise Mistake(f"the job's split gave {count} pieces with the weight {parts:g} of a batch with the weight {whole:g}: "
                      f"every sample must be in one piece, and the job's weight must count them")
    return list(found)
