"""A job whose loss knows a teacher: everything else is the student's own, so the ordinary loop trains it.

    loss = (1 - alpha) (the student's own loss) + alpha (distillation)

The teacher is asked in the loss, after the student's forward: `Job.forward`, `data` and `metrics` stay the student's, a batch in pieces is
taught piece by piece, in a pipeline only the last stage asks, and what the teacher computes is tracked like the rest of the step.
Unlabelled batches have no own loss. With noise the student sees another batch than the teacher (Xie, Luong, Hovy, Le: Self-training with
Noisy Student improves ImageNet classification, 2020, arXiv 1911.04252).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.distillation.losses import Term, distillation_loss, parsed
from shoestring.compression.distillation.teachers import Teachers, aside, seen_outputs
from shoestring.compression.distillation.unlabelled import Unlabelled, bare, beside
from shoestring.core.batch import Batch, mapped
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.data.feed import looking
from shoestring.runs.initial_weights import valued

PROJECTION = "distil_projection_"  # a parameter of the student's model: the widths of hidden states differ


class StudentOutputs(NamedTuple):
    """What the student gave, and its hidden states as they are compared."""

    own: Any
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True)
class DistillationSettings:
    """How a student learns."""

    terms: tuple[Term, ...]
    temperature: float
    alpha: float
    axis: int

    @property
    def hidden(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.name == "hidden")


@dataclass(frozen=True)
class Projecting:
    """Makes the student's model with projections of its hidden states; `plain` makes it without, for who only asks it."""

    plain: Callable[[], nn.Module]
    widths: Callable[[], Sequence[tuple[int, int]]]

    def __call__(self) -> nn.Module:
        return with_projections(self.plain(), self.widths())


def lesson(objective: str, temperature: float, alpha: float, axis: int = -1) -> DistillationSettings:
    if not temperature > 0 or not math.isfinite(temperature):
        raise Mistake(f"--temperature {temperature:g}: give a number above 0")
    if not 0 < alpha <= 1:
        raise Mistake(
            f"--alpha {alpha:g} is the share of the teacher in the loss, (1 - alpha) own + alpha distillation: give more than 0, "
            f"which would be without a teacher, and at most 1 (no labels)"
        )
    return DistillationSettings(parsed(objective), temperature, alpha, axis)


def distilled(
    own: Job,
    teachers: Teachers,
    *,
    objective: str = "kl",
    temperature: float = 2.0,
    alpha: float = 0.1,
    axis: int = -1,
    noise: Callable[[Batch], Batch] | None = None,
    unlabelled: Job | None = None,
    ratio: int = 1,
) -> Job:
    """The student's job, taught; the defaults of temperature and alpha are those that benchmarks/compress/distillation_defaults.py chose
    over four tasks. `noise` changes what the student is given in training; `unlabelled`: a job with more data, of which
    `ratio` batches follow each labelled one."""
    plan = lesson(objective, temperature, alpha, axis)
    widths = cache(lambda: probed(own, teachers, plan.hidden))

    def forward(model: nn.Module, batch: Batch) -> Any:
        given = noise(bare(batch)) if noise is not None and model.training else bare(batch)
        if not plan.hidden:
            return own.forward(model, given)
        with seen_outputs(model, [term.student for term in plan.hidden], "the student") as seen:
            output = own.forward(model, given)
        return StudentOutputs(
            output, tuple(projected(model, number, seen[term.student]) for number, term in enumerate(plan.hidden))
        )

    def loss(output: Any, batch: Batch) -> Tensor:
        inner, hidden = bare(batch), output.hidden if plan.hidden else ()
        mine = output.own if plan.hidden else output
        check_gradient(plan.hidden, hidden)
        said = teachers.say(inner, [term.teacher for term in plan.hidden])
        taught = distillation_loss(plan.terms, mine, hidden, said, inner, plan.temperature, plan.axis)
        if plan.alpha == 1 or isinstance(batch, Unlabelled):
            return plan.alpha * taught
        return (1 - plan.alpha) * own.loss(mine, inner) + plan.alpha * taught

    job = replace(own, forward=forward, loss=loss)
    if plan.hidden:
        metrics = own.metrics
        job = replace(
            job,
            model=Projecting(own.model, widths),
            weights=without_projections(own),
            metrics=metrics and (lambda output, batch: metrics(output.own, batch)),
        )
    return job if unlabelled is None else beside(job, own, unlabelled, ratio)


def without_projections(own: Job) -> Any:
    """The weights that the student begins from; projections are new."""
    from shoestring.core.weights import as_weights

    given = as_weights(own.weights)
    return given and replace(given, new=(*given.new, f"{PROJECTION}*"))


def check_gradient(terms: Sequence[Term], hidden: Sequence[Tensor]) -> None:
    """Refuse hidden states that no gradient goes through while the model is trained: the student would not learn them."""
    for term, value in zip(terms, hidden, strict=True):
        if torch.is_grad_enabled() and not value.requires_grad:
            raise Mistake(
                f"the hidden states of {term.student} carry no gradient: the module lies inside a block that is computed again, "
                f"or nothing before it is trained; name a whole block in hidden(...), or plan without Checkpoint"
            )


def projected(model: nn.Module, number: int, hidden: Tensor) -> Tensor:
    """Hidden states as wide as the teacher's."""
    matrix = getattr(model, f"{PROJECTION}{number}", None)
    return hidden if matrix is None else hidden @ matrix


def with_projections(model: nn.Module, widths: Sequence[tuple[int, int]]) -> nn.Module:
    """The model with a matrix (student's width, teacher's width) where the two differ: parameters, so that a Sequential stays one."""
    for number, (own, theirs) in enumerate(widths):
        if own != theirs:
            model.register_parameter(f"{PROJECTION}{number}", nn.Parameter(torch.randn(own, theirs) / math.sqrt(own)))
    return model


def probed(own: Job, teachers: Teachers, terms: Sequence[Term]) -> list[tuple[int, int]]:
    """How wide the hidden states of each term are, the student's and the teacher's: both are asked once, with the first batch."""

    def work() -> list[tuple[int, int]]:
        with looking(own) as feed:
            batch = next(islice(feed, 1))
        model = valued(own.model(), own).eval()
        with torch.no_grad(), seen_outputs(model, [term.student for term in terms], "the student") as seen:
            own.forward(model, bare(batch))
        said = teachers.say(bare(batch), [term.teacher for term in terms])
        return [
            (seen[term.student].shape[-1], theirs[0].shape[-1]) for term, theirs in zip(terms, said.hidden, strict=True)
        ]

    return aside(work)


def gaussian(deviation: float) -> Callable[[Batch], Batch]:
    """Noise of this standard deviation on all numbers of a batch with a fraction; drawn from the run's own stream, like dropout."""
    if not deviation > 0:
        raise Mistake(f"--noise {deviation:g}: give a standard deviation above 0")

    def noisy(batch: Batch) -> Batch:
        return mapped(
            lambda leaf: (
                leaf + deviation * torch.randn_like(leaf)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
                else leaf
            ),
            batch,
        )

    return noisy
