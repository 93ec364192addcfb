"""Heads trained by an ordinary job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring.compression.exits import CascadeModel, PartSeconds, calibrate, exit_job, gather_evidence, operate
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from tests.compression.exits.toys import Residual, Tokens, chain


def blobs(seed: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (rows,), generator=random)
    return torch.randn(rows, 5, generator=random) + 2 * nn.functional.one_hot(labels, 5), labels


def blob_job(**options: Any) -> Job:
    return Job(
        model=lambda: chain().train(),
        data=lambda: [blobs(seed) for seed in range(8)],
        held_out=lambda: [blobs(99)],
        steps=60,
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        **options,
    )


def test_loss_is_the_weighted_sum_and_metrics_are_of_every_exit() -> None:
    job = exit_job(blob_job(), (2, 1), weights=(0.5, 0.25), end_weight=2.0)
    model, batch = job.model(), blobs(0)
    output = model(batch[0])
    cross = nn.functional.cross_entropy
    expected = (
        2 * cross(output.end, batch[1])
        + 0.5 * cross(output.exits[0], batch[1])
        + 0.25 * cross(output.exits[1], batch[1])
    )
    torch.testing.assert_close(job.loss(output, batch), expected)
    assert job.metrics is not None and set(job.metrics(output, batch)) == {
        "accuracy",
        "accuracy_exit_1",
        "accuracy_exit_2",
    }


def test_heads_alone_leave_the_trunk_as_it_is_with_its_batch_norms_and_learn_without_labels() -> None:
    torch.manual_seed(0)
    images = torch.randn(32, 1, 6, 6)
    plain = Job(
        model=lambda: nn.Sequential(Residual(1, 4), Residual(4, 4), Residual(4, 4), nn.Flatten(), nn.Linear(144, 3)),
        data=lambda: [(images,)] * 4,
        steps=40,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    )
    job = exit_job(plain, (1,), train="heads", distil=True)
    model = job.model()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    first = [step.loss for step in shoestring.train(job, (), model)]
    assert first[-1] < 0.7 * first[0]
    assert all(torch.equal(value, before[name]) for name, value in model.model.state_dict().items())


def test_distillation_is_the_divergence_at_a_temperature() -> None:
    job = exit_job(blob_job(), (1,), train="heads", distil=True, temperature=3.0)
    model, batch = job.model(), blobs(0)
    output = model(batch[0])
    teacher, student = torch.softmax(output.end / 3, 1), torch.softmax(output.exits[0] / 3, 1)
    torch.testing.assert_close(job.loss(output, batch), 9 * (teacher * (teacher / student).log()).sum(1).mean())


def test_trained_calibrated_and_measured_on_data_never_seen() -> None:
    job = exit_job(blob_job(), (1, 2))
    torch.manual_seed(0)
    model = job.model()
    last = list(shoestring.train(job, (), model))[-1]
    assert last.metrics["accuracy_exit_1"] > 0.6
    early = model.eval().early()
    held_out, unseen = ([blobs(seed) for seed in seeds] for seeds in (range(100, 108), range(200, 208)))
    found = calibrate(
        gather_evidence(early, held_out, PartSeconds((1.0, 1.0, 2.0), (0.05, 0.05)), lambda batch: batch[1]), 0.01
    )
    early.thresholds.copy_(torch.tensor(found.point.thresholds))
    evidence = gather_evidence(early, unseen, PartSeconds((1.0, 1.0, 2.0), (0.05, 0.05)), lambda batch: batch[1])
    predicted, exits = (
        operate(evidence, found.point.thresholds),
        torch.cat([early.answer(batch[0]).exits for batch in unseen]),
    )
    right = torch.cat([early(batch[0]).argmax(1) == batch[1] for batch in unseen]).float().mean()
    assert (torch.bincount(exits, minlength=3) / len(exits)).tolist() == pytest.approx(predicted.shares, abs=0.005)
    assert float(right) == pytest.approx(predicted.quality, abs=0.005)
    assert predicted.shares[0] > 0 and predicted.loss < 0.03


def test_agreement_is_evidence_without_labels() -> None:
    torch.manual_seed(0)
    cascade = CascadeModel([chain(depth=2), chain(depth=3)]).eval()
    evidence = gather_evidence(cascade, [blobs(0), blobs(1)], PartSeconds((1.0, 2.0), (0.0,)))
    assert bool((evidence.right[:, -1] == 1).all()) and 0 < float(evidence.right[:, 0].mean()) < 1


def test_a_model_that_gives_a_dict_brings_its_own_loss_and_labels() -> None:
    class WithLoss(Tokens):
        def forward(
            self, ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
        ) -> dict[str, torch.Tensor]:  # type: ignore[override]
            found = super().forward(ids, attention_mask)
            return found if labels is None else {**found, "loss": nn.functional.cross_entropy(found["logits"], labels)}

    batch = {
        "ids": torch.randint(0, 20, (6, 5)),
        "attention_mask": torch.ones(6, 5),
        "labels": torch.randint(0, 4, (6,)),
    }
    job = exit_job(Job(model=WithLoss, data=lambda: [batch], steps=1), (1,))
    model = job.model()
    output = model(**batch)
    cross = nn.functional.cross_entropy
    torch.testing.assert_close(job.loss(output, batch), output.end["loss"] + cross(output.exits[0], batch["labels"]))
    with pytest.raises(Mistake, match="distil"):
        job.loss(output, {**batch, "labels": None})


def test_what_cannot_be_trained_so_is_refused() -> None:
    for options, said in (
        ({"train": "some"}, "trunk"),
        ({"weights": (1.0,)}, "one for each"),
        ({"weights": (1.0, -1.0)}, "0 or more"),
    ):
        with pytest.raises(Mistake, match=said):
            exit_job(blob_job(), (1, 2), **options)  # type: ignore[arg-type]
    with pytest.raises(Mistake, match="from 1 to 3"):
        exit_job(blob_job(), (4,))
    with pytest.raises(Mistake, match="no chain of like blocks"):
        exit_job(Job(model=lambda: nn.Linear(2, 2), data=list), (1,))
    with pytest.raises(Mistake, match="no batch"):
        gather_evidence(CascadeModel([chain(), chain()]), [], ((1.0, 1.0), (0.0,)))
