"""Distillation losses. T: temperature; z: outputs; p, q: the teacher's and the student's probabilities at temperature
T.

    kl           T^2 sum_c p_c log (p_c / q_c)            Hinton, Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015,
                                                          arXiv 1503.02531. T^2 keeps gradients as large as those of the
                                                          labels
    reverse_kl   T^2 sum_c q_c log (q_c / p_c)            mode-seeking: matches one mode of the teacher instead of covering all
    js           T^2 (KL(p | m) + KL(q | m)) / 2          Jensen-Shannon, m = (p + q) / 2; between the two
    mse          mean (z_student - z_teacher)^2           Ba, Caruana: Do Deep Nets Really Need to be Deep?, 2014, arXiv 1312.6184
    cosine       1 - cos(z_student, z_teacher)            for embeddings, along the last dimension
    hidden       mean (h_student W - h_teacher)^2         Romero et al.: FitNets: Hints for Thin Deep Nets, 2015, arXiv 1412.6550; W is
                                                          learned if widths differ, else absent

With several teachers p is the mean of their probabilities, and z and h are the means of their outputs. Every loss is
averaged first over the unmasked positions of a sample and then over samples, so micro-batches give the same values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shoestring.core.batch import Batch
from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake

# fields of a model's output that may be compared, in order of preference
OUTPUT_NAMES = ("logits", "sentence_embedding", "embeddings", "last_hidden_state")


@dataclass(frozen=True)
class Term:
    """One term of the objective: `weight` times a loss. For `hidden`: the names of a module of the student and one of
    the teacher."""

    name: str
    weight: float = 1.0
    student: str = ""
    teacher: str = ""

    def __str__(self) -> str:
        return f"{self.weight:g}*{self.name}" + (f"({self.student}={self.teacher})" if self.student else "")


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of all teachers for a batch, and hidden states of the requested modules, in order."""

    outputs: tuple[Tensor, ...]
    hidden: tuple[tuple[Tensor, ...], ...] = ()  # (module, teacher)


def parse_objective(written: str) -> tuple[Term, ...]:
    """Parse an objective.

    >>> parse_objective("kl")
    (Term(name='kl', weight=1.0, student='', teacher=''),)
    >>> [str(term) for term in parse_objective("0.7*kl + 2*hidden(layers.1=layers.3)")]
    ['0.7*kl', '2*hidden(layers.1=layers.3)']
    """
    found = []
    for part in re.split(r"\+(?![^(]*\))", written):
        match = re.fullmatch(r"\s*(?:([0-9.eE-]+)\s*\*)?\s*(\w+)\s*(?:\(([^=()]*)=([^=()]*)\))?\s*", part)
        if match is None:
            raise Mistake(
                f"the objective {written!r}: {part.strip()!r} can't be read; write for example 'kl', '0.5*kl + 0.5*mse' or "
                f"'kl + hidden(layers.1=layers.3)' (a module of the student = one of the teacher)"
            )
        weight, name, student, teacher = match.groups()
        try:
            found.append(checked_term(Term(name, float(weight or 1), (student or "").strip(), (teacher or "").strip())))
        except ValueError as error:
            raise (
                error if isinstance(error, Mistake) else Mistake(f"the objective {written!r}: {weight} is no weight")
            ) from None
    return tuple(found)


def checked_term(term: Term) -> Term:
    if term.name not in (*OBJECTIVES, "hidden"):
        raise Mistake(
            f"the objective {term.name!r} is unknown: there are {', '.join((*OBJECTIVES, 'hidden'))}"
            f"{did_you_mean(term.name, (*OBJECTIVES, 'hidden'))}"
        )
    if not term.weight > 0 or not math.isfinite(term.weight):
        raise Mistake(
            f"the objective {term.name} has the weight {term.weight:g}: give a number above 0, or leave it out"
        )
    if (term.name == "hidden") != bool(term.student and term.teacher):
        raise Mistake(
            f"the objective {term}: "
            + (
                "name the modules whose outputs are compared, hidden(layers.1=layers.3)"
                if term.name == "hidden"
                else "only hidden(...) takes modules"
            )
        )
    return term


def compared_tensor(output: Any) -> Tensor:
    """The tensor of an output that is compared: the output itself, `logits` or a similar field, else the first
    floating-point tensor that is not the loss.

    >>> compared_tensor((torch.tensor(0.5), torch.ones(2, 3))).shape
    torch.Size([2, 3])
    """
    if isinstance(output, Tensor):
        return output
    values: dict[Any, Any] = {}
    if isinstance(output, Mapping):
        values = dict(output)
    elif isinstance(output, (tuple, list)):
        values = dict(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    elif hasattr(output, "__dict__"):
        values = vars(output)
    usable: dict[Any, Tensor] = {name: value for name, value in values.items() if name != "loss" and is_numbers(value)}
    named = [usable[name] for name in OUTPUT_NAMES if name in usable]
    if not usable:
        raise Mistake(
            f"the model returned a {type(output).__name__} without a floating-point tensor to compare: distillation compares a "
            f"tensor, a tuple or mapping of tensors, or an output with `logits`; give Job(forward=...) that returns one"
        )
    return named[0] if named else next(iter(usable.values()))


def is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def position_mask(output: Tensor, batch: Batch) -> Tensor | None:
    """The attention mask of the batch, if it fits an output of shape (sample, position, feature); else None."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    fits = isinstance(mask, Tensor) and output.dim() == 3 and mask.shape == output.shape[:2]
    return mask if fits else None


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over samples of the mean over unmasked positions; `values`: (sample, ...)."""
    if mask is None:
        return values.mean()
    here = mask.to(values.dtype)
    return ((values * here).sum(1) / here.sum(1).clamp(min=1)).mean()


def mean_log_probabilities(outputs: Sequence[Tensor], temperature: float) -> Tensor:
    """Log of the mean of several teachers' probabilities; classes are the last dimension."""
    each = torch.stack([functional.log_softmax(one.float() / temperature, -1) for one in outputs])
    return torch.logsumexp(each, 0) - math.log(len(outputs))


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) along the last dimension."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    return temperature**2 * kl_divergence(
        mean_log_probabilities(teachers, temperature), mean_log_probabilities([student], temperature)
    )


def reverse_kl(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    return temperature**2 * kl_divergence(
        mean_log_probabilities([student], temperature), mean_log_probabilities(teachers, temperature)
    )


def js(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    p, q = mean_log_probabilities(teachers, temperature), mean_log_probabilities([student], temperature)
    middle = torch.logaddexp(p, q) - math.log(2)
    return temperature**2 * (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2


def mse(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    return (student.float() - mean_output(teachers)).square().mean(-1)


def cosine(student: Tensor, teachers: Sequence[Tensor], temperature: float) -> Tensor:
    return 1 - functional.cosine_similarity(student.float(), mean_output(teachers), dim=-1)


def mean_output(outputs: Sequence[Tensor]) -> Tensor:
    """Mean of the teachers' outputs."""
    return outputs[0].float() if len(outputs) == 1 else torch.stack([one.float() for one in outputs]).mean(0)


# name -> loss per position of tensors (sample, ..., feature)
OBJECTIVES: dict[str, Callable[[Tensor, Sequence[Tensor], float], Tensor]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "mse": mse,
    "cosine": cosine,
}
CLASS_OBJECTIVES = ("kl", "reverse_kl", "js")


def distillation_loss(
    terms: Sequence[Term],
    output: Any,
    hidden: Sequence[Tensor],
    said: TeacherOutputs,
    batch: Batch,
    temperature: float,
    axis: int = -1,
) -> Tensor:
    """Weighted sum of the objective's terms. `hidden`: the student's projected hidden states, one per hidden term;
    `axis`: the class dimension."""
    total: Tensor | None = None
    left = iter(zip(hidden, said.hidden, strict=True))
    for term in terms:
        if term.name == "hidden":
            own, theirs = next(left)
            check_shapes(term, own, theirs)
            values, mask = mse(own, theirs, temperature), position_mask(own, batch)
        else:
            own, theirs = compared_tensor(output), said.outputs
            check_shapes(term, own, theirs)
            check_classes(term, own, axis)
            mask = position_mask(own, batch)
            moved = [one.movedim(axis, -1) for one in theirs] if term.name in CLASS_OBJECTIVES else list(theirs)
            values = OBJECTIVES[term.name](
                own.movedim(axis, -1) if term.name in CLASS_OBJECTIVES else own, moved, temperature
            )
        value = term.weight * masked_mean(values, mask)
        total = value if total is None else total + value
    assert total is not None, "an objective has a term"
    return total


def check_shapes(term: Term, own: Tensor, theirs: Sequence[Tensor]) -> None:
    """Refuse tensors of different shapes."""
    for one in theirs:
        if one.shape != own.shape:
            what = (
                f"the modules {term.student} and {term.teacher} give"
                if term.student
                else "the student and the teacher give"
            )
            raise Mistake(
                f"{what} tensors of the shapes {tuple(own.shape)} and {tuple(one.shape)} for one batch, and the objective "
                f"{term.name} needs equal shapes: give the student as many outputs as its teacher has, or let the forward of "
                f"one of the jobs select those that both have"
            )


def check_classes(term: Term, own: Tensor, axis: int) -> None:
    if term.name not in CLASS_OBJECTIVES:
        return
    if not -own.dim() <= axis < own.dim():
        raise Mistake(
            f"the objective {term.name} along dimension {axis} of outputs of the shape {tuple(own.shape)}, which have none"
        )
    if own.dim() < 2 or own.shape[axis] < 2:
        raise Mistake(
            f"the objective {term.name} compares probabilities of classes, and outputs of the shape {tuple(own.shape)} have one "
            f"number a sample, whose probability is always 1: write --objective mse"
        )
