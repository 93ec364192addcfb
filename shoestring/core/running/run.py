"""A run: the replaceable parts that the training loop calls.

Contract: `gradients` adds to `.grad`; clipping by the global norm belongs to `update`
(tests/training/test_promises_clipped.py). What must survive a restart is in `Run.state` (core/running/run_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, samples, split, to_device
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, default_forward
from shoestring.core.optimization.optimizer import make_optimizer
from shoestring.core.optimization.stepping import UNDIVIDED, Stepping
from shoestring.core.optimization.stepping_trial import try_stepping
from shoestring.core.private import number_of
from shoestring.core.running.run_state import RunState
from shoestring.core.user_code.seams import calls_user
from shoestring.core.user_code.user_functions import guard_loss, value_text
from shoestring.core.workers.assignment import Assignment, OwnPart, own_part
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import Mesh, on_one_axis


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


Able = TypeVar("Able")
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

    def state_that(self, ability: type[Able]) -> list[Able]:
        """The parts of its state that have an ability, in the order in which techniques were applied."""
        return [part for part in self.state.values() if isinstance(part, ability)]


def add_up_shared(shared: Mapping[nn.Parameter, AddUp]) -> None:
    """Sum the gradients of every weight that several stages use."""
    for weight, add_up in shared.items():
        gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        weight.grad = gradient if add_up(gradient, weight.grad is not None) else None


def weighted_loss(loss: Tensor, share: float) -> Tensor:
    """A part of the batch's loss, weighted by its share of the batch's weight; NaN from a mean over nothing counts as
    zero."""
    return share * loss if share else 0.0 * loss.nan_to_num(0.0)


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
    optimizer = make_optimizer(job, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device

    @calls_user("model or loss")
    def gradients(run: Run, batch: Batch) -> Tensor:
        here = to_device(batch, device)
        value = run.loss(run.forward(run.model, here), here)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise Mistake(f"the job's loss gave {value_text(value)}: it must be one number, the mean over the batch")
        if not value.requires_grad:
            raise Mistake(
                "the job's loss depends on no weight that is trained, so there is nothing to train it by: look for detach(), "
                "item(), no_grad() or argmax() in the model, its forward and the loss"
            )
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
        stepping=cache(lambda: try_stepping(job, optimizer, model)),
    )
