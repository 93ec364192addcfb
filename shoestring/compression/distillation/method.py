"""Turn a student's job into a distillation job: only the loss changes, so the ordinary training loop runs it.

    loss = (1 - alpha) * (the student's own loss) + alpha * (distillation loss)

The teacher runs inside the loss, after the student's forward pass. So `Job.forward`, `data` and `metrics` stay the
student's, the teacher sees the same micro-batches, in a pipeline only the last stage runs it, and its memory and time
are tracked like the rest of the step. Unlabelled batches use the distillation loss alone. With noise the student sees a
noisy version of the teacher's batch (Xie, Luong, Hovy, Le: Self-training with Noisy Student improves ImageNet
classification, 2020, arXiv 1911.04252).
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

from shoestring.compression.distillation.losses import Term, distillation_loss, parse_objective
from shoestring.compression.distillation.teachers import Teachers, record_outputs, run_in_thread
from shoestring.compression.distillation.unlabelled import Unlabelled, mix_unlabelled, unwrap
from shoestring.core.batch import Batch, map_leaves
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.data.feed import looking
from shoestring.runs.weights.initial_weights import fill_weights

PROJECTION = (
    "distil_projection_"  # prefix of the student's projection parameters, for hidden states of different widths
)


class StudentOutputs(NamedTuple):
    """The student's output, and its projected hidden states."""

    own: Any
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True)
class DistillationSettings:
    """Settings of a distillation."""

    terms: tuple[Term, ...]
    temperature: float
    alpha: float
    axis: int

    @property
    def hidden_terms(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.name == "hidden")


@dataclass(frozen=True)
class ProjectedStudent:
    """Factory of the student's model with projections of its hidden states; `plain` builds it without, for
    inference."""

    plain: Callable[[], nn.Module]
    widths: Callable[[], Sequence[tuple[int, int]]]

    def __call__(self) -> nn.Module:
        return add_projections(self.plain(), self.widths())


def distillation_settings(objective: str, temperature: float, alpha: float, axis: int = -1) -> DistillationSettings:
    if not temperature > 0 or not math.isfinite(temperature):
        raise Mistake(f"--temperature {temperature:g}: give a number above 0")
    if not 0 < alpha <= 1:
        raise Mistake(
            f"--alpha {alpha:g} is the weight of the teacher in the loss, (1 - alpha) own + alpha distillation: give more than 0 "
            f"(0 would ignore the teacher) and at most 1 (no labels)"
        )
    return DistillationSettings(parse_objective(objective), temperature, alpha, axis)


def distillation_job(
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
    """The student's job with a distillation loss.

    The defaults of temperature and alpha were chosen on four tasks (benchmarks/compress/distillation_defaults.py).
    `noise` changes the student's batches in training. `unlabelled`: a job with more data, of which `ratio` batches
    follow each labelled one.
    """
    plan = distillation_settings(objective, temperature, alpha, axis)
    widths = cache(lambda: hidden_widths(own, teachers, plan.hidden_terms))

    def forward(model: nn.Module, batch: Batch) -> Any:
        given = noise(unwrap(batch)) if noise is not None and model.training else unwrap(batch)
        if not plan.hidden_terms:
            return own.forward(model, given)
        with record_outputs(model, [term.student for term in plan.hidden_terms], "the student") as seen:
            output = own.forward(model, given)
        return StudentOutputs(
            output,
            tuple(project_hidden(model, number, seen[term.student]) for number, term in enumerate(plan.hidden_terms)),
        )

    def loss(output: Any, batch: Batch) -> Tensor:
        inner = unwrap(batch)
        mine, hidden = (output.own, output.hidden) if plan.hidden_terms else (output, ())
        check_gradient(plan.hidden_terms, hidden)
        said = teachers.say(inner, [term.teacher for term in plan.hidden_terms])
        taught = distillation_loss(plan.terms, mine, hidden, said, inner, plan.temperature, plan.axis)
        if plan.alpha == 1 or isinstance(batch, Unlabelled):
            return plan.alpha * taught
        return (1 - plan.alpha) * own.loss(mine, inner) + plan.alpha * taught

    job = replace(own, forward=forward, loss=loss)
    if plan.hidden_terms:
        job = with_projections(job, ProjectedStudent(own.model, widths))
    return job if unlabelled is None else mix_unlabelled(job, own, unlabelled, ratio)


def with_projections(job: Job, model: ProjectedStudent) -> Job:
    """The job of a student whose hidden states are projected to the teacher's widths."""
    metrics = job.metrics
    return replace(
        job,
        model=model,
        weights=weights_without_projections(job),
        metrics=metrics and (lambda output, batch: metrics(output.own, batch)),
    )


def weights_without_projections(own: Job) -> Any:
    """The student's initial weights; projections are initialised at random."""
    from shoestring.core.model.weights import as_weights

    given = as_weights(own.weights)
    return given and replace(given, new=(*given.new, f"{PROJECTION}*"))


def check_gradient(terms: Sequence[Term], hidden: Sequence[Tensor]) -> None:
    """Refuse hidden states without a gradient during training: the student could not learn them."""
    for term, value in zip(terms, hidden, strict=True):
        if torch.is_grad_enabled() and not value.requires_grad:
            raise Mistake(
                f"the hidden states of {term.student} carry no gradient: the module lies inside a checkpointed block, or nothing "
                f"before it is trained; name a whole block in hidden(...), or plan without Checkpoint"
            )


def project_hidden(model: nn.Module, number: int, hidden: Tensor) -> Tensor:
    """Project hidden states to the teacher's width."""
    matrix = getattr(model, f"{PROJECTION}{number}", None)
    return hidden if matrix is None else hidden @ matrix


def add_projections(model: nn.Module, widths: Sequence[tuple[int, int]]) -> nn.Module:
    """Add a projection (student's width, teacher's width) for each pair of different widths. Projections are
    parameters, not modules, so that a Sequential stays callable."""
    for number, (own, theirs) in enumerate(widths):
        if own != theirs:
            model.register_parameter(f"{PROJECTION}{number}", nn.Parameter(torch.randn(own, theirs) / math.sqrt(own)))
    return model


def hidden_widths(own: Job, teachers: Teachers, terms: Sequence[Term]) -> list[tuple[int, int]]:
    """Widths of the student's and the teacher's hidden states for each term, found by running both on the first
    batch."""

    def work() -> list[tuple[int, int]]:
        with looking(own) as feed:
            batch = next(islice(feed, 1))
        model = fill_weights(own.model(), own).eval()
        with torch.no_grad(), record_outputs(model, [term.student for term in terms], "the student") as seen:
            own.forward(model, unwrap(batch))
        said = teachers.say(unwrap(batch), [term.teacher for term in terms])
        return [
            (seen[term.student].shape[-1], theirs[0].shape[-1]) for term, theirs in zip(terms, said.hidden, strict=True)
        ]

    return run_in_thread(work)


def gaussian_noise(deviation: float) -> Callable[[Batch], Batch]:
    """Add Gaussian noise of this standard deviation to all floating-point tensors of a batch. It uses the run's random
    state, like dropout."""
    if not deviation > 0:
        raise Mistake(f"--noise {deviation:g}: give a standard deviation above 0")

    def noisy(batch: Batch) -> Batch:
        return map_leaves(
            lambda leaf: (
                leaf + deviation * torch.randn_like(leaf)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
                else leaf
            ),
            batch,
        )

    return noisy
