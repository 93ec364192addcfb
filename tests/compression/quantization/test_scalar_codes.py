"""Codebooks of single numbers."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.quantization.scalar_codes import PrefixSums, fit_codebook, lloyd, nearest_codes
from shoestring.core.errors import Mistake

SHAPES = [(7,), (64,), (5, 24), (1, 30), (30, 1), (8, 3, 3, 3), (13, 7), (1,), (40, 130)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(form: CodebookFormat, weight: Tensor, importance: Tensor | None = None) -> float:
    off = (form.dense() - weight).double().square()
    return float((off if importance is None else off * importance).sum())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [0, 5, 64])
def test_bytes_are_those_of_the_layout_and_what_is_saved_comes_back(
    shape: tuple[int, ...], bits: int, group: int
) -> None:
    weight = drawn(*shape)
    form = fit_codebook(weight, bits, group)
    tensors = load(save({name: one.contiguous() for name, one in form.tensors().items()}))
    assert form.stored_bytes == sum(one.numel() * one.element_size() for one in tensors.values())
    again = CodebookFormat(shape, weight.dtype, form.settings, tensors)
    assert (
        torch.equal(again.dense(), form.dense())
        and form.dense().shape == weight.shape
        and form.dense().dtype == weight.dtype
    )
    assert error(form, weight) <= float(weight.square().sum())


@pytest.mark.parametrize("shape", [(20, 16), (20, 13), (6, 4, 2, 1), (20, 3)])
@pytest.mark.parametrize("group", [0, 8])
def test_rows_are_those_of_the_dense_weight(shape: tuple[int, ...], group: int) -> None:
    form = fit_codebook(drawn(*shape), 3, group)
    for index in (torch.tensor([[0, 5], [3, 3]]), torch.tensor(2), torch.zeros(0, dtype=torch.int64)):
        assert torch.equal(form.rows(index), form.dense()[index])


def test_rows_of_a_vector_are_its_numbers() -> None:
    form = fit_codebook(drawn(16), 4)
    assert torch.equal(form.rows(torch.tensor([3, 1])), form.dense()[[3, 1]])


def brute_force(numbers: Tensor, weights: Tensor, entries: int) -> float:
    """The least error there is: clusters of one dimension are intervals."""
    order = numbers.argsort()
    values, heavy, best = numbers[order].double(), weights[order].double(), float("inf")
    for cuts in combinations(range(1, len(values)), entries - 1):
        total = 0.0
        for first, last in zip((0, *cuts), (*cuts, len(values)), strict=True):
            part, mass = values[first:last], heavy[first:last]
            total += float((mass * (part - (mass * part).sum() / mass.sum()).square()).sum())
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_weighted_k_means_finds_the_least_error_of_few_numbers(seed: int) -> None:
    weight, importance = drawn(1, 12, seed=seed).half().float(), drawn(12, seed=seed + 100).square() + 1e-3
    assert error(fit_codebook(weight, 2, importance=importance), weight, importance) == pytest.approx(
        brute_force(weight[0], importance, 4), rel=2e-2, abs=1e-6
    )  # values are float16


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group", [0, 16])
def test_k_means_is_never_worse_than_percentiles(bits: int, group: int) -> None:
    for weight in (
        drawn(40, 48),
        drawn(40, 48) ** 3,
        drawn(40, 48).sign() + 0.01 * drawn(40, 48, seed=1),
        torch.zeros(4, 16),
    ):
        means, percentiles = (fit_codebook(weight, bits, group, method=method) for method in ("kmeans", "percentile"))
        assert error(means, weight) <= error(percentiles, weight) + 1e-9


def test_k_means_of_normal_numbers_is_that_of_lloyd_and_max(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.compression.quantization.scalar_codes.SAMPLE", 1 << 16)
    weight = drawn(200, 1000)  # more than the sample
    assert error(fit_codebook(weight, 2), weight) / weight.numel() == pytest.approx(
        0.1175, rel=0.01
    )  # Max 1960, table I
    assert error(fit_codebook(weight, 4), weight) / weight.numel() == pytest.approx(0.009497, rel=0.02)


def test_a_few_large_numbers_among_many_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.compression.quantization.scalar_codes.SAMPLE", 1 << 12)
    weight = drawn(200, 1000)
    weight[7, ::250] = torch.tensor([40.0, -40.0, 41.0, -41.0])
    assert float((fit_codebook(weight, 8).dense() - weight).abs().max()) < 2


def test_importance_lowers_the_error_that_it_weighs() -> None:
    weight, importance = drawn(64, 64) * (1 + torch.arange(64) % 3), torch.logspace(-3, 1, 64)
    for group in (0, 32):
        plain, weighted = fit_codebook(weight, 3, group), fit_codebook(weight, 3, group, importance)
        assert error(weighted, weight, importance) < error(plain, weight, importance)
        assert error(weighted, weight) > error(plain, weight), "it is not for nothing"


def test_an_iteration_never_makes_the_error_larger() -> None:
    numbers, weights = drawn(5000), drawn(5000, seed=1).square()
    begun = numbers[:16].sort().values
    after = lloyd(PrefixSums.of(numbers, weights), begun).float()
    errors = [
        float((weights * (numbers - values[nearest_codes(numbers, values).long()]).square()).sum())
        for values in (begun, after)
    ]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("value", [0.0, 0.5, -2.0, 1e-7])
@pytest.mark.parametrize("group", [0, 8])
def test_a_constant_weight_comes_back(value: float, group: int) -> None:
    for method in ("percentile", "kmeans"):
        dense = fit_codebook(torch.full((4, 16), value), 4, group, method=method).dense()
        assert torch.allclose(dense, torch.full((4, 16), value), rtol=1e-3, atol=3e-8)


def test_few_different_numbers_come_back_exactly() -> None:
    weight = torch.tensor([-1.0, 0.0, 0.25, 7.0])[
        torch.randint(4, (30, 30), generator=torch.Generator().manual_seed(0))
    ]
    assert torch.equal(fit_codebook(weight, 2).dense(), weight)


def test_the_same_input_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.compression.quantization.scalar_codes.SAMPLE", 1 << 14)
    weight = drawn(60, 1000)
    one, two = (fit_codebook(weight, 4, 64).tensors() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_weight_keeps_its_type(dtype: torch.dtype) -> None:
    form = fit_codebook(drawn(8, 8).to(dtype), 4, 8)
    assert form.dense().dtype == dtype and form.rows(torch.tensor([1])).dtype == dtype


@pytest.mark.parametrize(
    ("weight", "importance", "said"),
    [
        (torch.tensor([[1.0, torch.nan]]), None, "not finite"),
        (torch.tensor([[1.0, torch.inf]]), None, "not finite"),
        (torch.tensor([[1.0, 1e6]]), None, "float16"),
        (torch.zeros(0, 4), None, "is empty"),
        (torch.ones(2, 3), torch.ones(2), "one per column"),
        (torch.ones(2, 3), torch.tensor([1.0, -1.0, 1.0]), "not negative"),
        (torch.ones(2, 3), torch.tensor([1.0, torch.nan, 1.0]), "finite"),
    ],
)
def test_what_no_value_is_near_to_is_refused(weight: Tensor, importance: Tensor | None, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        fit_codebook(weight, 4, importance=importance)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(Mistake, match="percentile, kmeans"):
        fit_codebook(drawn(4, 4), 4, method="median")


def test_importances_of_nothing_are_those_of_all() -> None:
    weight = drawn(8, 8)
    assert error(fit_codebook(weight, 4, importance=torch.zeros(8)), weight) < 0.5 * float(weight.square().sum())


@pytest.mark.parametrize("settings", [{"bits": 1, "group": 0}, {"bits": 9, "group": 0}, {"bits": 4, "group": -1}])
def test_settings_that_can_not_be_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a codebook of"):
        CodebookFormat.layout((4, 4), torch.float32, settings)
