"""A run: the replaceable parts that the training loop calls.

Contract: `gradients` adds to `.grad`; clipping by the global norm belongs to `update`
(tests/training/test_promises_clipped.py). What must survive a restart is in `Run.state`, in classes that inherit from
`RunState`: nothing is asked of a part by the name of an attribute (tests/core/test_run.py).

State is put together part by part: `whole_optimizer` widens what the part that was applied next gives, and
`own_optimizer` narrows it on the way back, so that Pipeline, TensorParallel and Shard need not know of each other
(tests/training/tensor/test_sliced_stages.py). `weights` are the model's with what is trained beside them, `result` has
averages in their place, and `digested` is what the SHA-256 is of (tests/training/memory/test_ema.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shoestring.core.assignment import Assignment, OwnPart, own_part
from shoestring.core.batch import Batch, moved, samples, split
from shoestring.core.called import guard_loss
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
    """A weight that is not in memory: on disk, or in parts on several workers."""

    dtype: torch.dtype
    shape: torch.Size

    def pieces(
        self,
    ) -> Iterator[
        Tensor
    ]: ...  # its numbers in order, some at a time; all workers that hold parts must read it together


class RunState:
    """Base class for a part of a run that has state: a technique overrides the defaults that do not fit.

    A part's abilities are the methods of its class, never optional attributes.
    """

    of_technique: ClassVar[bool] = True  # whether a technique made it, so that the report shows its state
    beside_model: ClassVar[bool] = (
        False  # whether it has weights that are trained beside the model's, without which a run can't be resumed
    )
    on_disk: ClassVar[bool] = (
        False  # whether its state is in a file that only it can read; a checkpoint says what lies where in it
    )

    def state_dict(self) -> dict[str, Any]:
        """Its state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""

    def saved(self) -> None:
        """A checkpoint with its state is safe on disk. Called before the next step, and only if `on_disk`."""

    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        """Undo this part's sharding of the optimizer state: the state of all weights, from this worker's. Parts are
        called from the last applied to the first, so that the first returns what one process would have."""
        return own

    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any] | None:
        """The inverse, called from the first applied to the last: this worker's part of a whole state. None: it has
        none."""
        return whole

    @property
    def kept(self) -> Mapping[str, StoredTensor]:
        """Weights of the model that it stores elsewhere, by name."""
        return {}

    def merged(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's weights by name, merged with what it trains beside them."""
        return weights

    def told(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """State included in the trained model's SHA-256: the model's weights, or what it trains beside them."""
        return weights

    def guarding(self) -> AbstractContextManager[object]:
        """While inside, refuse code of the job that is called outside of a step and uses a weight that is not here."""
        return nullcontext()

    def finish(self) -> None:
        """The run is over and the model's weights are in memory: merge what it trained beside them into them."""

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Averages over the steps that replace weights in exports, by name. Its state has them as "averages" too, each
        once."""
        return {}

    @property
    def moved(self) -> int:
        """Bytes that it has moved to and from the disk so far."""
        return 0

    @property
    def stored(self) -> int:
        """Bytes that it stores on the disk."""
        return 0

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Its buffers for reading and writing."""
        return ()

    @property
    def own_times(self) -> OwnTimes | None:
        """This worker's actions in the last step, with their times; None without a schedule."""
        return None

    @property
    def remark(self) -> str:
        """A remark for the user."""
        return ""


class StepNotes:
    """Values found during a step and reported after it; nothing is computed for it."""

    def __init__(self) -> None:
        self.norm: float | Tensor | None = None  # of all gradients, before clipping

    def note_norm(self, norm: Tensor) -> None:
        """On a GPU it is read later, when the step is reported with its loss: reading it now would wait for the
        kernels."""
        self.norm = number_of(norm) if norm.device.type == "cpu" else norm

    def take_norm(self) -> float | None:
        """The norm of the last step; returned once."""
        found, self.norm = self.norm, None
        return None if found is None else float(found)


def alone(number: Tensor) -> None:
    """The sum over workers for a worker that is alone: does nothing."""


@dataclass(frozen=True)
class Slice:
    """A slice of every sequence of a batch, or all of it. It runs forward after the slices before it, and backward
    before them."""

    batch: Batch
    share: float = 1.0  # weight of its loss in the loss of the batch
    within: Callable[[], AbstractContextManager[object]] = (
        nullcontext  # the context of its forward, and of its backward
    )


# Sums a gradient over several workers, in place. The argument says whether this worker has one (else it holds zeros),
# and the result whether any worker has: plain training leaves an unused weight without a gradient, and weight decay
# would move one that has zeros.
AddUp = Callable[[Tensor, bool], bool]


MakesContext = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class BatchCuts:
    """How a batch is cut, and what its parts weigh."""

    weight: Callable[[Batch], float]
    pieces: Callable[[Batch, int], list[Batch]] = split  # splits a batch into so many pieces
    count: Callable[[Batch], int] = samples  # largest number of pieces of a batch
    slices: Callable[[Run, Batch], list[Slice]] = lambda run, batch: [Slice(batch)]  # of a batch's sequences
    parts: int = 1  # most micro-batches that a batch is computed in


@dataclass(frozen=True)
class OutsideSteps:
    """How the model is called outside of a step."""

    usable: MakesContext = nullcontext  # while inside, the model can be called
    # The same if all workers call the model equally often, where that takes less memory; None: it does not
    together: MakesContext | None = None
    evaluate: Callable[[nn.Module, Batch], Any] = default_forward  # the forward without techniques, inside of these

    def used_by_all(self) -> AbstractContextManager[object]:
        """`together` where there is one, else `usable`."""
        return self.usable() if self.together is None else self.together()

    def within(self, usable: MakesContext, together: MakesContext) -> OutsideSteps:
        """The same, inside of a technique's own contexts."""

        @contextmanager
        def both(outer: MakesContext, inner: MakesContext) -> Iterator[None]:
            with outer(), inner():
                yield

        return replace(
            self, usable=lambda: both(usable, self.usable), together=lambda: both(together, self.used_by_all)
        )


@dataclass(frozen=True)
class RunTeam:
    """This worker among the others."""

    mesh: Mesh = field(default_factory=on_one_axis)  # its position, with links to the others
    assignment: Assignment = field(default_factory=OwnPart)  # which parts of batches it trains on, for the feed
    # Called after a step; True: all workers are at the same step with the same weights, so they may agree on what to do
    # (save, stop)
    synchronised: Callable[[], bool] = lambda: True

    @property
    def link(self) -> Link:
        """The link to all other workers."""
        return self.mesh.link

    def objects(self, mine: Any) -> list[Any]:
        """All workers' values; in an asynchronous group, where nobody waits for all, only this worker's."""
        return [mine] if self.assignment.asynchronous else self.link.objects(mine)


@dataclass(frozen=True)
class HeldWeights:
    """Which of the model's weights this worker holds, where workers hold different ones."""

    # Sums a number over workers that hold different weights, in place: used for the global norm of gradients
    summed: Callable[[Tensor], None] = alone
    # The fraction of a weight's squared gradient that this worker adds to that sum: 1/n if n of those workers hold the
    # same weight
    share: Callable[[Tensor], float] = lambda weight: 1.0
    # Weights that other workers hold: here they have no numbers, and torch crashes when it prints one
    elsewhere: frozenset[nn.Parameter] = field(default=frozenset(), repr=False)
    # Weights that several stages use, each with a function that sums its gradients (or the same shard of them) over
    # those stages. The pipeline sums them after backward, unless a technique that sums gradients further takes this
    # over and leaves it empty
    shared: Mapping[nn.Parameter, AddUp] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RunSettings:
    """What the job asks of its steps, and the place on disk of what must survive a restart."""

    steps: int = 0  # planned number of steps
    seed: int = 0
    clip: float = 0.0  # largest global norm of the gradients; 0: no clipping
    folder: Path | None = None
    resumed: bool = False  # whether `folder` holds state to load instead of initialising

    def file(self, name: str) -> Path | None:
        return self.folder / name if self.folder else None


@dataclass(frozen=True)
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    blocks: Mapping[str, nn.Module]  # the model's repeated parts, by name, in execution order
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Tensor]  # a mean over the batch's weight
    gradients: Callable[[Run, Batch], Tensor]  # adds to every .grad, returns the loss
    backward: Callable[[Run, Tensor], None]  # the part of it from the loss to every .grad
    update: Callable[[Run], None]  # the optimizer's step
    cuts: BatchCuts
    outside: OutsideSteps = field(default_factory=OutsideSteps)
    team: RunTeam = field(default_factory=RunTeam)
    held: HeldWeights = field(default_factory=HeldWeights)
    settings: RunSettings = field(default_factory=RunSettings)
    state: Mapping[str, RunState] = field(default_factory=dict)  # state for checkpoints, besides model and optimizer
    example: Callable[[], Batch] | None = None  # a typical batch, for techniques that trace the model before training
    # How the optimizer's step can be divided; found by trial on first use
    stepping: Callable[[], Stepping] = lambda: UNDIVIDED
    last: bool = True  # True in the last micro-batch: gradients may be reduced now
    noted: StepNotes = field(default_factory=StepNotes)  # values that steps write and reports read


def add_up_shared(shared: Mapping[nn.Parameter, AddUp]) -> None:
    """Sum the gradients of every weight that several stages use."""
    for weight, add_up in shared.items():
        gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        weight.grad = gradient if add_up(gradient, weight.grad is not None) else None


def stored_weights(run: Run) -> dict[str, StoredTensor]:
    """The weights that are not in memory, by name."""
    return {name: one for part in run.state.values() for name, one in part.kept.items()}


def weights(run: Run) -> dict[str, Any]:
    """The model's state by name: tensors and stored tensors, with what is trained beside them."""
    found: Mapping[str, Any] = {**run.model.state_dict(), **stored_weights(run)}
    for part in run.state.values():
        found = part.merged(found)
    return dict(found)


def digest_state(run: Run) -> dict[str, Any]:
    """State included in the trained model's SHA-256: the model's state, or the part of it that a technique trains."""
    found: Mapping[str, Any] = {**run.model.state_dict(), **stored_weights(run)}
    for part in run.state.values():
        found = part.told(found)
    return dict(found)


def result(run: Run) -> dict[str, Any]:
    """The model's state for export: as `weights`, with averages where a part keeps them."""
    return {**weights(run), **{name: value for part in run.state.values() for name, value in part.averages.items()}}


@contextmanager
def guarded_outside(run: Run) -> Iterator[None]:
    """Around code of the job that is called outside of a step, in `OutsideSteps.usable`: refuses weights that are not here."""
    with ExitStack() as stack:
        for part in run.state.values():
            stack.enter_context(part.guarding())
        yield


def traffic(run: Run) -> int:
    """Bytes moved to and from the disk so far."""
    return sum(part.moved for part in run.state.values())


def stored(run: Run) -> int:
    """Bytes of state on the disk."""
    return sum(part.stored for part in run.state.values())


def weighed(loss: Tensor, share: float) -> Tensor:
    """A part of the batch's loss, weighted by its share of the batch's weight; NaN from a mean over nothing counts as
    zero."""
    return share * loss if share else 0.0 * loss.nan_to_num(0.0)


def brought_home(run: Run) -> None:
    """Bring all weights back into memory, where possible; the run is over."""
    found = {
        name: torch.cat([piece.clone() for piece in one.pieces()]).view(one.shape)
        for name, one in stored_weights(run).items()
    }
    for name, parameter in run.model.named_parameters():
        if name in found:
            parameter.data = found[name].to(parameter.device)
    for part in run.state.values():
        part.finish()


def clip_across_workers(run: Run, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Clip gradients to the run's largest norm where other workers hold other weights of the model; returns the global
    norm."""
    found = [(parameter.grad, run.held.share(parameter)) for parameter in parameters if parameter.grad is not None]
    like = found[0][0] if found else parameters[0].data  # a weight only as a last resort: it may be stored elsewhere
    square = like.new_zeros(1, dtype=torch.float32)
    for gradient, share in found:
        square += share * gradient.float().square().sum()
    run.held.summed(square)
    norm = square.sqrt_()
    factor = torch.clamp(run.settings.clip / (norm + 1e-6), max=1.0)
    for gradient, _ in found:
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def plain_run(job: Job, model: nn.Module, blocks: Mapping[str, nn.Module]) -> Run:
    """Plain training, without techniques: what every technique is compared with."""
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
        if run.settings.clip:
            run.noted.note_norm(
                nn.utils.clip_grad_norm_(parameters, run.settings.clip)
                if run.held.summed is alone
                else clip_across_workers(run, parameters)
            )
        run.optimizer.step()

    return Run(
        model,
        optimizer,
        blocks,
        job.forward,
        guard_loss(job.loss),
        gradients,
        backward,
        update,
        BatchCuts(job.weight, job.pieces, job.count),
        OutsideSteps(evaluate=job.forward),
        RunTeam(job.mesh, own_part(job.mesh)),
        settings=RunSettings(job.steps, job.seed, job.clip),
        stepping=cache(lambda: tried_stepping(job, optimizer, model)),
    )
