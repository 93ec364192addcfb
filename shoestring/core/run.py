"""A run: the handful of replaceable parts that the training loop calls."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoestring.core.assignment import Assignment, OwnPart, own_part
from shoestring.core.batch import Batch, moved, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.link import Link
from shoestring.core.mesh import Mesh, on_one_axis


@runtime_checkable
class StoredTensor(Protocol):
    """A weight that is not in memory: on disk, or in parts that several workers hold."""

    dtype: torch.dtype
    shape: torch.Size

    def pieces(self) -> Iterator[Tensor]: ...   # its numbers in order, some at a time; asked of all workers that hold parts of it


class Part:
    """A part of a run with state, to inherit from: a technique overrides what is other than these defaults.

    What a part can do is what its class says, never an attribute that happens to have a name.
    """

    of_technique: ClassVar[bool] = True   # a technique made it, so the report shows its state
    on_disk: ClassVar[bool] = False   # its state is a file that only it can read; a checkpoint says what lies where in it

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must have of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""

    def saved(self) -> None:
        """A checkpoint with its state is safe. Only called, before the next step, if `on_disk`."""

    def whole_optimizer(self) -> dict[str, Any] | None:
        """The optimizer's state as one process would have it, where workers hold parts of it; None: the optimizer has it."""
        return None

    def put_optimizer(self, whole: dict[str, Any]) -> bool:
        """Take this worker's part of such a state; gives whether that was done. If no part does it, the optimizer takes all of it."""
        return False

    @property
    def kept(self) -> Mapping[str, StoredTensor]:
        """Weights of the model that it keeps elsewhere, by name."""
        return {}

    @property
    def moved(self) -> int:
        """Bytes that it moved to and from the disk so far."""
        return 0

    @property
    def stored(self) -> int:
        """Bytes that it keeps on the disk."""
        return 0

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Tensors that it holds to read into and write from."""
        return ()

    @property
    def remark(self) -> str:
        """Something that the user should know."""
        return ""


@dataclass(frozen=True)
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: Mapping[str, nn.Module]                     # the model's repeated parts, by name, in the order they run
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]                # a mean over the batch's weight
    weight: Callable[[Batch], float]
    gradients: Callable[[Run, Batch], Tensor]           # adds to every .grad, returns the loss
    backward: Callable[[Run, Tensor], None]             # a part of that: from the loss to every .grad
    update: Callable[[Run], None]                       # moves the weights
    pieces: Callable[[Batch, int], list[Batch]] = split   # a batch in so many pieces
    count: Callable[[Batch], int] = samples             # how many pieces a batch has at most
    state: Mapping[str, Part] = field(default_factory=dict)   # what must survive a restart, beside model and optimizer
    usable: Callable[[], AbstractContextManager[object]] = nullcontext   # while inside, the model can be called outside of a step
    mesh: Mesh = field(default_factory=on_one_axis)     # where this worker stands among the others, with links to them
    assignment: Assignment = field(default_factory=OwnPart)   # the parts of batches that it trains on, for the feed
    # Asked after a step: all workers are at the same step and have the same weights, so they may agree on what to do (save, stop)
    synchronised: Callable[[], bool] = lambda: True
    last: bool = True                                   # no more gradients follow in this step
    parts: int = 1                                      # pieces at most that a batch is computed in, one after the other
    clip: float = 0.0                                   # largest global norm of the gradients; 0: no clipping
    steps: int = 0                                      # that it is to take
    folder: Path | None = None                          # where files can be kept that must survive a restart
    resumed: bool = False                               # `folder` holds state to load instead of initialising

    @property
    def link(self) -> Link:
        """To all other workers."""
        return self.mesh.link


def gathered(run: Run, mine: Any) -> list[Any]:
    """What each worker gave, for all of them; in an asynchronous group, where nobody waits for all, only one's own."""
    return [mine] if run.assignment.asynchronous else run.link.objects(mine)


def kept(run: Run) -> dict[str, StoredTensor]:
    """The weights that are not in memory, by name."""
    return {name: one for part in run.state.values() for name, one in part.kept.items()}


def weights(run: Run) -> dict[str, Any]:
    """The model's state by name, as tensors and what is kept."""
    return {**run.model.state_dict(), **kept(run)}


def traffic(run: Run) -> int:
    """Bytes moved to and from the disk so far."""
    return sum(part.moved for part in run.state.values())


def stored(run: Run) -> int:
    """Bytes of state that stay on the disk."""
    return sum(part.stored for part in run.state.values())


def weighed(loss: Tensor, share: float) -> Tensor:
    """A part of the batch's loss by its share of the batch's weight; a mean over nothing, which is not a number, counts nothing."""
    return share * loss if share else 0.0 * loss.nan_to_num(0.0)


def brought_home(run: Run) -> None:
    """Put all weights back into memory, where they can be; the run is over."""
    found = {name: torch.cat([piece.clone() for piece in one.pieces()]).view(one.shape) for name, one in kept(run).items()}
    for name, parameter in run.model.named_parameters():
        if name in found:
            parameter.data = found[name].to(parameter.device)


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
        run.backward(run, value)
        return value.detach()

    def backward(run: Run, value: Tensor) -> None:
        value.backward()

    def update(run: Run) -> None:
        if run.clip:
            nn.utils.clip_grad_norm_(parameters, run.clip)
        run.optimizer.step()

    optimizer = job.optimizer(parameters)
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise Mistake(f"{type(optimizer).__name__} evaluates the loss itself, several times a step, and a step here is one forward and one "
                      f"backward: use another optimizer")
    return Run(model, optimizer, blocks, job.forward, job.loss, job.weight, gradients, backward, update,
               job.pieces, job.count, mesh=job.mesh, assignment=own_part(job.mesh), clip=job.clip, steps=job.steps)
