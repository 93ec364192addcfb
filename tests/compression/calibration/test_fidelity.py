"""What models say is compared batch by batch: the answers of a language model are many times as large as the model."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import shoestring
from shoestring import Job
from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.calibration.fidelity import (
    AT_ONCE,
    OutputComparison,
    OutputMeasure,
    all_finite,
    bernoulli_divergence,
    column_statistics,
    damage_per_vector,
    error_among_few,
    fidelity,
    measure_from_values,
    vector_damages,
    with_variance,
)
from shoestring.compression.calibration.probe import join_if_equivalent


def data(seed: int, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 5, (16,), generator=generator)) for _ in range(count)
    ]


class Watched:
    """A forward that notes how many rows of earlier answers are alive, and how often it is called with a batch."""

    def __init__(self) -> None:
        self.answers: list[weakref.ref[Any]] = []
        self.alive, self.calls = 0, Counter[float]()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.answers = [one for one in self.answers if one() is not None]
        self.alive = max(self.alive, sum(len(memory) for one in self.answers if (memory := one()) is not None))
        self.calls[float(batch[0].sum())] += 1
        found: Tensor = model(batch[0])
        if found.requires_grad:
            return found
        memory = found.numpy()  # lives as long as any view of the answer
        self.answers.append(weakref.ref(memory))
        return torch.from_numpy(memory)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))


def test_few_answers_are_alive_at_once_and_each_unseen_batch_is_answered_once_by_each_model(tmp_path: Path) -> None:
    watched = Watched()
    job = Job(
        model=model,
        data=lambda: data(0, 16),
        held_out=lambda: data(1, 60),
        forward=watched,
        loss=lambda output, batch: functional.cross_entropy(output, batch[1]),
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
    )
    small = shoestring.compress(job, tmp_path / "small", use=["Quantize(bits=4)"])
    assert small.report["fidelity"]["samples"] >= 700 and small.report["metric"]["accuracy"]["n"] >= 700
    last = float(data(1, 60)[-1][0].sum())
    assert watched.calls[last] == 2, "the small model's forward and the original's, for fidelity and metrics together"
    assert watched.alive <= 5 * 16, (
        "the probe's, and those of one batch: not those of the 12 batches for confirming, or of 48 unseen"
    )


@pytest.mark.parametrize("measure", ["cosine", "kl"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_vectors_that_are_compared_in_parts_have_the_same_damages(measure: str, axis: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(4, AT_ONCE // 64, 5, 8, generator=generator)[:, :, :2, :]
    found = wanted + 0.1 * torch.randn(wanted.shape, generator=generator)
    how = OutputMeasure("y", measure, axis)
    whole = vector_damages(found.double().movedim(axis, -1), wanted.double().movedim(axis, -1), how)
    assert torch.allclose(damage_per_vector(found, wanted, how), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("numbers", [1, 5])
@pytest.mark.parametrize("samples", [3, AT_ONCE // 16])
def test_numbers_that_are_compared_in_parts_have_the_same_damages(numbers: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(samples, 5, 2 * AT_ONCE // samples, generator=generator)
    found = wanted + 0.1 * torch.randn(wanted.shape, generator=generator)
    how = OutputMeasure("y", "r2", 1, variance=tuple(map(float, range(1, numbers + 1))))
    whole = ((found.double() - wanted.double()).square() / torch.tensor(how.variance)[:, None]).mean((1, 2))
    assert torch.allclose(damage_per_vector(found, wanted, how), whole, rtol=1e-12, atol=0)
    whole = -torch.expm1(-bernoulli_divergence(found.double(), wanted.double()))
    assert torch.allclose(damage_per_vector(found, wanted, replace(how, measure="binary")), whole, rtol=1e-9, atol=0)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor in double precision that any operator made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float64:
            self.numbers = max(self.numbers, found.untyped_storage().nbytes() // 8)
        return found


@pytest.mark.parametrize("measure", ["cosine", "kl", "binary", "r2"])
@pytest.mark.parametrize("samples", [1, 64])
def test_no_measure_keeps_outputs_in_double_precision_as_a_whole(measure: str, samples: int) -> None:
    """A language model's logits are larger than its weights, and took five times their memory where they were numbers."""
    found, wanted = (
        torch.ones(samples, 16 * AT_ONCE // samples // 8, 8),
        torch.ones(1).expand(samples, 16 * AT_ONCE // samples // 8, 8),
    )
    with Largest() as largest:
        OutputComparison(OutputMeasure("y", measure, -1, variance=(1.0,))).add(found, wanted)
    vectors = 0 if measure == "r2" else found.numel() // (1 if measure == "binary" else 8)
    assert largest.numbers <= max(2 * AT_ONCE, vectors)


@pytest.mark.parametrize("width", [1, 3, 40])
def test_variances_are_found_without_all_outputs_in_double_precision(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    said = [1e3 + torch.randn(5, AT_ONCE // width // count, width, generator=generator) for count in (1, 2)]
    with Largest() as largest:
        known = column_statistics(said, -1)
        with_variance(OutputMeasure("y", "r2"), said)
    rows = torch.cat([one.double().reshape(-1, width) for one in said])
    assert largest.numbers <= AT_ONCE < rows.numel() and known.vectors == len(rows)
    torch.testing.assert_close(known.mean, rows.mean(0))
    torch.testing.assert_close(known.variance, rows.var(0, correction=0))


def test_the_probe_has_few_samples_where_many_tokens_or_pixels_are_compared_as_numbers() -> None:
    batches = [torch.randn(16, 12, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    study = Calibration(
        nn.Linear(4, 3),
        lambda model, batch: model(batch),
        batches,
        batches,
        (OutputMeasure("output", "r2", variance=(1.0,)),),
    )
    assert [len(one) for one in study.probe] == [4], "12 vectors of each sample are compared"


def test_batches_of_different_lengths_are_one_comparison() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = [{"logits": torch.randn(3, length, 7, generator=generator)} for length in (2, 5)]
    found = [{"logits": one["logits"] + 0.1 * torch.randn(one["logits"].shape, generator=generator)} for one in wanted]
    how = OutputMeasure("logits", "kl")
    together = fidelity(found, wanted, [how]).outputs[0]
    each = torch.cat(
        [
            damage_per_vector(one["logits"], other["logits"], how).flatten()
            for one, other in zip(found, wanted, strict=True)
        ]
    )
    assert (
        together.mean == pytest.approx(1 - float(each.mean()), abs=1e-14)
        and together.count == 21
        and together.samples == 6
    )
    assert together.worst == pytest.approx(1 - float(each.max()), abs=1e-14)


def test_the_probe_is_one_batch_where_the_model_answers_it_alike() -> None:
    parts = [one[0][:2] for one in data(0, 4)]
    made = model()

    def alone(batches: Any) -> list[Any]:
        return [{"y": made(batch)} for batch in batches]

    def among_others(batches: Any) -> list[Any]:
        return [{"y": made(batch) - made(batch).mean(0)} for batch in batches]

    with torch.no_grad():
        assert [len(one) for one in join_if_equivalent(parts, alone)] == [8]
        assert [len(one) for one in join_if_equivalent(parts, among_others)] == [2, 2, 2, 2]
        assert len(join_if_equivalent([*parts, torch.zeros(2, 9)], alone)) == 5, "samples of other shapes stay apart"
        assert [len(one) for one in join_if_equivalent(parts[:1], alone)] == [2]


def test_a_sum_that_overflows_is_no_number_that_is_not_finite() -> None:
    assert all_finite(torch.full((4,), 3e38))
    assert not all_finite(torch.tensor([1.0, torch.inf])) and not all_finite(torch.tensor([torch.inf, -torch.inf]))


def test_a_small_spread_far_from_zero_is_no_constant() -> None:
    """Numbers of 5000 +- 0.03 once counted as constant, so that no error that was not of thousands was seen."""
    wanted = 5000 + 0.03 * torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    how = measure_from_values("output", [wanted])
    assert how.variance[0] == pytest.approx(0.03**2, rel=0.2)
    assert fidelity([{"output": wanted + 0.03}], [{"output": wanted}]).mean < 0.2
    level = torch.full((256, 1), 5000.1)
    assert measure_from_values("output", [level]).variance[0] == pytest.approx(5000.1**2)


def test_a_few_samples_without_the_rare_damaged_ones_have_the_error_of_many() -> None:
    """One sample of a hundred holds nearly all of the damage, as in a classifier that is sure of its other answers."""

    def compared(damaged: Tensor) -> Any:
        angle = torch.where(damaged, 0.3, 0.001)
        sums = OutputComparison(OutputMeasure("y", "cosine"))
        sums.add(torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([[1.0, 0.0]]).expand(len(angle), 2))
        return sums.fidelity

    few, many = (compared(torch.arange(count) % 100 == 99) for count in (90, 1000))
    off = many.damage - few.damage
    assert few.standard_error is not None and off > 100 * few.standard_error
    known = error_among_few(few, many)
    assert known is not None and off < 3 * known
