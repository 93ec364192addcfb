"""Every objective against a few lines of NumPy, on every container, and what does not fit is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from shoestring.compression.distillation.losses import (
    OBJECTIVES,
    TeacherOutputs,
    compared_tensor,
    distillation_loss,
    parse_objective,
)
from shoestring.core.errors import Mistake

draw = torch.Generator().manual_seed(0)
STUDENT = torch.randn(6, 5, generator=draw)
TEACHERS = [torch.randn(6, 5, generator=draw) for _ in range(3)]


def softmax(z: Tensor, t: float) -> np.ndarray[Any, Any]:
    e = np.exp(z.double().numpy() / t)
    return np.asarray(e / e.sum(-1, keepdims=True))


def reference(name: str, student: Tensor, teachers: list[Tensor], t: float) -> float:
    p, q = np.mean([softmax(one, t) for one in teachers], 0), softmax(student, t)
    z, a = np.mean([one.double().numpy() for one in teachers], 0), student.double().numpy()
    m = (p + q) / 2
    rows = {
        "kl": (p * np.log(p / q)).sum(-1) * t * t,
        "reverse_kl": (q * np.log(q / p)).sum(-1) * t * t,
        "js": t * t * ((p * np.log(p / m)).sum(-1) + (q * np.log(q / m)).sum(-1)) / 2,
        "mse": ((a - z) ** 2).mean(-1),
        "cosine": 1 - (a * z).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(z, axis=-1),
    }[name]
    return float(rows.mean())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_an_objective_is_its_formula(name: str, count: int, temperature: float) -> None:
    found = distillation_loss(
        parse_objective(name), STUDENT, (), TeacherOutputs(tuple(TEACHERS[:count])), None, temperature
    )
    assert float(found) == pytest.approx(reference(name, STUDENT, TEACHERS[:count], temperature), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_student_that_says_what_its_teacher_says_has_no_loss(name: str) -> None:
    assert float(
        distillation_loss(parse_objective(name), STUDENT, (), TeacherOutputs((STUDENT.clone(),)), None, 2.0)
    ) == pytest.approx(0, abs=1e-6)


def test_objectives_are_weighed_and_hidden_states_compared() -> None:
    hidden, theirs = torch.randn(6, 3), torch.randn(6, 3)
    found = distillation_loss(
        parse_objective("0.5*kl + 2*hidden(a=b)"),
        STUDENT,
        (hidden,),
        TeacherOutputs((TEACHERS[0],), ((theirs,),)),
        None,
        3.0,
    )
    expected = 0.5 * reference("kl", STUDENT, TEACHERS[:1], 3.0) + 2 * float((hidden - theirs).square().mean())
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_batch_in_pieces_has_the_mean_of_their_losses() -> None:
    for name in OBJECTIVES:
        whole = distillation_loss(parse_objective(name), STUDENT, (), TeacherOutputs((TEACHERS[0],)), None, 2.0)
        parts = [
            distillation_loss(parse_objective(name), STUDENT[rows], (), TeacherOutputs((TEACHERS[0][rows],)), None, 2.0)
            for rows in (slice(0, 3), slice(3, 6))
        ]
        assert torch.allclose(whole, sum(parts) / 2), name


def test_padding_does_not_count() -> None:
    student, teacher = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    found = [
        float(
            distillation_loss(parse_objective("kl"), student, (), TeacherOutputs((one,)), {"attention_mask": mask}, 1.0)
        )
        for one in (teacher, teacher + 9 * torch.randn(2, 4, 5) * (1 - mask)[..., None])
    ]
    assert found[0] == pytest.approx(found[1])
    expected = (
        reference("kl", student[0], [teacher[0]], 1.0) + reference("kl", student[1, :2], [teacher[1, :2]], 1.0)
    ) / 2
    assert found[0] == pytest.approx(expected, rel=1e-5)


def test_classes_may_lie_in_another_dimension() -> None:
    student, teacher = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 4, 4)
    found = distillation_loss(parse_objective("kl"), student, (), TeacherOutputs((teacher,)), None, 2.0, axis=1)
    rows = [one.movedim(1, -1).reshape(-1, 5) for one in (student, teacher)]
    assert float(found) == pytest.approx(reference("kl", rows[0], [rows[1]], 2.0), rel=1e-5)


class Pair(NamedTuple):
    state: Tensor
    logits: Tensor


class Output(dict[str, Any]):
    """As transformers' ModelOutput is: a mapping with attributes."""


def test_the_tensor_that_is_compared_is_found_in_any_container() -> None:
    loss, logits, other = torch.tensor(0.1), torch.randn(2, 3), torch.randn(2, 7)
    for output in (
        logits,
        (logits, other),
        [loss, logits],
        Pair(other, logits),
        Output(loss=loss, last_hidden_state=other, logits=logits),
        {"ids": torch.ones(2, dtype=torch.long), "z": logits},
        SimpleNamespace(loss=loss, logits=logits),
    ):
        assert compared_tensor(output) is logits
    for output in ((loss,), {"ids": torch.ones(2, dtype=torch.long)}, None, "text"):
        with pytest.raises(Mistake, match="floating-point tensor"):
            compared_tensor(output)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("cosin", "unknown.*did you mean"),
        ("kl + ", "can't be read"),
        ("0*kl", "above 0"),
        ("-1*kl", "above 0"),
        ("1.2.3*kl", "no weight"),
        ("hidden", "name the modules"),
        ("kl(a=b)", "only hidden"),
        ("", "can't be read"),
    ],
)
def test_an_objective_that_can_not_be_is_refused(written: str, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        parse_objective(written)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(Mistake, match=r"\(6, 5\) and \(6, 4\)"):
        distillation_loss(parse_objective("mse"), STUDENT, (), TeacherOutputs((TEACHERS[0][:, :4],)), None, 1.0)
    with pytest.raises(Mistake, match="one number a sample"):
        distillation_loss(parse_objective("kl"), STUDENT[:, :1], (), TeacherOutputs((TEACHERS[0][:, :1],)), None, 1.0)
    with pytest.raises(Mistake, match="dimension 3"):
        distillation_loss(parse_objective("kl"), STUDENT, (), TeacherOutputs((TEACHERS[0],)), None, 1.0, axis=3)
