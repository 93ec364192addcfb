"""A run: the handful of replaceable parts that the training loop calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoestring.core.assignment import Assignment, OwnPart, own_part
from shoestring.core.batch import Batch, moved, samples, split
from shoestring.core.called import guarded
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, default_forward
from shoestring.core.link import Link
from shoestring.core.mesh import Mesh, on_one_axis
from shoestring.core.optimizer import made_optimizer
from shoestring.core.private import number_of
from shoestring.core.seams import calls_user
from shoestring.core.staging import OwnTimes
from shoestring.core.stepping import UNDIVIDED, Stepping, tried_stepping


@runtime_checkable
class StoredTensor(Protocol):
    """A weight that is not in memory: on disk, or in parts that several workers hold."""

    dtype: torch.dtype
    shape: torch.Size

    def pieces(
        self,
    ) -> Iterator[Tensor]: ...  # its numbers in order, some at a time; asked of all workers that hold parts of it


class RunState:
    """A part of a run with state, to inherit from: a technique overrides what is other than these defaults.

    What a part can do is what its class says, never an attribute that happens to have a name.
    """

    of_technique: ClassVar[bool] = True  # a technique made it, so the report shows its state
    beside_model: ClassVar[bool] = (
        False  # it has weights that are trained beside the model's, and a run can't go on without them
    )
    on_disk: ClassVar[bool] = (
        False  # its state is a file that only it can read; a checkpoint says what lies where in it
    )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must have of it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""

    def saved(self) -> None:
        """A checkpoint with its state is safe. Only called, before the next step, if `on_disk`."""

    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        """Of the optimizer's state as it is with this part, that without it: of all weights, where this one divides them between
        workers. Parts are asked from the last that was applied to the first, so that the first gives what one process would have."""
        return own

    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any] | None:
        """The other way round, from the first that was applied to the last: this worker's part of such a state. None: it has none."""
        return whole

    @property
    def kept(self) -> Mapping[str, StoredTensor]:
        """Weights of the model that it keeps elsewhere, by name."""
        return {}

    def merged(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's weights by name, with what it trains beside them."""
        return weights

    def told(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of the model's weights and what it has beside them, what the digest of a trained model is of."""
        return weights

    def guarding(self) -> AbstractContextManager[object]:
        """While inside, code of the job that is called outside of a step and uses a weight which is not there is refused."""
        return nullcontext()

    def finish(self) -> None:
        """The run is over and the model's weights are in memory: leave there what it has beside them, and nothing else."""

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """What is given away instead of weights, by their names: means over the steps. Its state has them as "averages" too, each once."""
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
    def own_times(self) -> OwnTimes | None:
        """When it did what in the last step; None: it has no schedule."""
        return None

    @property
    def remark(self) -> str:
        """Something that the user should know."""
        return ""


class Noted:
    """What was found on the way through a step and is told after it. Nothing is computed for it."""

    def __init__(self) -> None:
        self.norm: float | Tensor | None = None  # of all gradients, before they were clipped

    def note_norm(self, norm: Tensor) -> None:
        """On a GPU it is read when the step is told of, with the loss: reading it now would wait for the kernels."""
        self.norm = number_of(norm) if norm.device.type == "cpu" else norm

    def take_norm(self) -> float | None:
        """The norm of the last step, told once."""
        found, self.norm = self.norm, None
        return None if found is None else float(found)


def alone(number: Tensor) -> None:
    """What a worker adds up with the others, if there are none."""


@dataclass(frozen=True)
class Slice:
    """A part of every sequence of a batch, or all of it. It runs forward after those before it, and backward before them."""

    batch: Batch
    share: float = 1.0  # that its loss has in the loss of the batch
    within: Callable[[], AbstractContextManager[object]] = (
        nullcontext  # where it runs forward, and where it runs backward
    )


# Adds up a gradient over several workers, in place. It is told whether there is one here (else these are zeros), and gives whether there is
# one anywhere: plain training leaves a weight that nobody used without a gradient, and weight decay moves one that has zeros.
AddUp = Callable[[Tensor, bool], bool]


@dataclass(frozen=True)
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: Mapping[str, nn.Module]  # the model's repeated parts, by name, in the order they run
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]  # a mean over the batch's weight
    weight: Callable[[Batch], float]
    gradients: Callable[[Run, Batch], Tensor]  # adds to every .grad, returns the loss
    backward: Callable[[Run, Tensor], None]  # a part of that: from the loss to every .grad
    update: Callable[[Run], None]  # moves the weights
    pieces: Callable[[Batch, int], list[Batch]] = split  # a batch in so many pieces
    count: Callable[[Batch], int] = samples  # how many pieces a batch has at most
    slices: Callable[[Run, Batch], list[Slice]] = lambda run, batch: [
        Slice(batch)
    ]  # a batch in slices of its sequences
    state: Mapping[str, RunState] = field(
        default_factory=dict
    )  # what must survive a restart, beside model and optimizer
    usable: Callable[[], AbstractContextManager[object]] = (
        nullcontext  # while inside, the model can be called outside of a step
    )
    # The same where all workers call it equally often, if that takes less memory; None: it does not
    together: Callable[[], AbstractContextManager[object]] | None = None
    evaluate: Callable[[nn.Module, Batch], Any] = (
        default_forward  # forward without techniques, in evaluation: inside of these
    )
    mesh: Mesh = field(default_factory=on_one_axis)  # where this worker stands among the others, with links to them
    # Adds a number up over workers that hold different weights of the model, in place: a square of gradients' norm is that of all
    summed: Callable[[Tensor], None] = alone
    # Of a weight, how much of its gradient's square this worker brings into that sum: 1/n where n of those workers hold the same weight
    share: Callable[[Tensor], float] = lambda weight: 1.0
    # Weights that other workers hold: here they have no numbers to print, and torch dies of printing one
    elsewhere: frozenset[nn.Parameter] = field(default=frozenset(), repr=False)
    # Weights that several stages use, each with what adds up its gradients (or the same part of them) over those stages. Gradients are
    # added up after backward by the pipeline, unless a technique that unites gradients further takes this over and leaves it empty
    shared: Mapping[nn.Parameter, AddUp] = field(default_factory=dict, repr=False)
    example: Callable[[], Batch] | None = (
        None  # gives a batch like those to come, for who must see one before training begins
    )
    assignment: Assignment = field(default_factory=OwnPart)  # the parts of batches that it trains on, for the feed
    # Asked after a step: all workers are at the same step and have the same weights, so they may agree on what to do (save, stop)
    synchronised: Callable[[], bool] = lambda: True
    last: bool = True  # no more gradients follow in this step
    parts: int = 1  # pieces at most that a batch is computed in, one after the other
    clip: float = 0.0  # largest global norm of the gradients; 0: no clipping
    steps: int = 0  # that it is to take
    folder: Path | None = None  # where files can be kept that must survive a restart
    seed: int = 0  # the job's
    resumed: bool = False  # `folder` holds state to load instead of initialising
    noted: Noted = field(default_factory=Noted)  # what steps write and who tells of them reads
    stepping: Callable[[], Stepping] = lambda: (
        UNDIVIDED
    )  # how the optimizer's step can be divided; tried when it is asked for

    @property
    def link(self) -> Link:
        """To all other workers."""
        return self.mesh.link


def add_up_shared(shared: Mapping[nn.Parameter, AddUp]) -> None:
    """Of every weight that several stages use, the sum of their gradients."""
    for weight, add_up in shared.items():
        gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        weight.grad = gradient if add_up(gradient, weight.grad is not None) else None


def gathered(run: Run, mine: Any) -> list[Any]:
    """What each worker gave, for all of them; in an asynchronous group, where nobody waits for all, only one's own."""
    return [mine] if run.assignment.asynchronous else run.link.objects(mine)


def kept(run: Run) -> dict[str, StoredTensor]:
    """The weights that are not in memory, by name."""
    return {name: one for part in run.state.values() for name, one in part.kept.items()}


def weights(run: Run) -> dict[str, Any]:
    """The model's state by name, as tensors and what is kept, with what is trained beside it."""
    found: Mapping[str, Any] = {**run.model.state_dict(), **kept(run)}
    for part in run.state.values():
        found = part.merged(found)
    return dict(found)


def digested(run: Run) -> dict[str, Any]:
    """What the digest of a trained model is of: its state, or what of it a technique trains."""
    found: Mapping[str, Any] = {**run.model.state_dict(), **kept(run)}
    for part in run.state.values():
        found = part.told(found)
    return dict(found)


def result(run: Run) -> dict[str, Any]:
    """The model's state to give away: as `weights`, with averages where a part keeps them."""
    return {**weights(run), **{name: value for part in run.state.values() for name, value in part.averages.items()}}


@contextmanager
def guarded_outside(run: Run) -> Iterator[None]:
    """Around code of the job that is called outside of a step, in `Run.usable`: weights that are not there are not used silently."""
    with ExitStack() as stack:
        for part in run.state.values():
            stack.enter_context(part.guarding())
        yield


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
    found = {
        name: torch.cat([piece.clone() for piece in one.pieces()]).view(one.shape) for name, one in kept(run).items()
    }
    for name, parameter in run.model.named_parameters():
        if name in found:
            parameter.data = found[name].to(parameter.device)
    for part in run.state.values():
        part.finish()


def clipped(run: Run, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Scale gradients down to the run's largest norm, where other workers hold other weights of the model; gives the norm of all."""
    found = [(parameter.grad, run.share(parameter)) for parameter in parameters if parameter.grad is not None]
    like = found[0][0] if found else parameters[0].data  # not a weight, if there is anything else: it may be elsewhere
    square = like.new_zeros(1, dtype=torch.float32)
    for gradient, share in found:
        square += share * gradient.float().square().sum()
    run.summed(square)
    norm = square.sqrt_()
    factor = torch.clamp(run.clip / (norm + 1e-6), max=1.0)
    for gradient, _ in found:
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def plain_run(job: Job, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Run:
    """The run everybody writes first; the yardstick every technique is compared with."""
    optimizer = made_optimizer(job, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device

    @calls_user("model or loss")
    def gradients(run: Run, batch: Batch) -> Tensor:
        here = moved(batch, device)
        value = run.loss(run.forward(run.model, here), here)
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise Mistake(f"the job's loss gave {found}: it must be one number, the mean over the batch")
        run.backward(run, value)
        return value.detach()

    @calls_user("backward pass")
    def backward(run: Run, value: Tensor) -> None:
        value.backward()

    @calls_user("optimizer")
    def update(run: Run) -> None:
        if run.clip:
            run.noted.note_norm(
                nn.utils.clip_grad_norm_(parameters, run.clip) if run.summed is alone else clipped(run, parameters)
            )
        run.optimizer.step()

    return Run(
        model,
        optimizer,
        blocks,
        job.forward,
        guarded(job.loss),
        job.weight,
        gradients,
        backward,
        update,
        job.pieces,
        job.count,
        evaluate=job.forward,
        mesh=job.mesh,
        assignment=own_part(job.mesh),
        clip=job.clip,
        steps=job.steps,
        seed=job.seed,
        stepping=cache(lambda: tried_stepping(job, optimizer, model)),
    )
