"""Codebooks of vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from shoestring.compression.formats.product import ProductFormat
from shoestring.compression.quantization.product_codes import VectorCoding, fit_product_codes
from shoestring.compression.quantization.vector_codes import alternate_codes_and_tables, encode, error_of, refit_tables
from shoestring.compression.room import plan_compression
from shoestring.compression.techniques.product_quantize import KINDS
from shoestring.core.errors import Mistake
from tests.compression.test_matrix import studied

SMALL = VectorCoding(length=2, bits=4, rounds=1)
RECIPES = [
    SMALL,
    replace(SMALL, length=3),
    replace(SMALL, books=0),
    replace(SMALL, stages=2),
    replace(SMALL, scaled=True),
    replace(SMALL, rotation=4),
    replace(SMALL, bits=9),
    replace(SMALL, stages=2, method="local search", bits=3),
    replace(SMALL, stages=2, method="additive", bits=3),
    replace(SMALL, rotation=8, scaled=True, books=4, stages=2, bits=3),
]
SHAPES = [(24,), (7,), (16, 8), (1, 12), (12, 1), (8, 3, 3, 3), (13, 7)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(form: ProductFormat, weight: Tensor, importance: Tensor | None = None) -> float:
    off = (form.dense() - weight).double().square()
    return float((off if importance is None else off * importance).sum())


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_layout_and_what_is_saved_comes_back(
    recipe: VectorCoding, shape: tuple[int, ...]
) -> None:
    weight = drawn(*shape)
    form = fit_product_codes(weight, recipe)
    tensors = load(save({name: one.contiguous() for name, one in form.tensors().items()}))
    assert form.stored_bytes == sum(one.numel() * one.element_size() for one in tensors.values())
    again = ProductFormat(shape, weight.dtype, form.settings, tensors)
    assert torch.equal(again.dense(), form.dense()) and form.dense().shape == weight.shape
    assert error(form, weight) <= float(weight.square().sum())


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
@pytest.mark.parametrize("columns", [16, 13])
def test_rows_are_those_of_the_dense_weight(recipe: VectorCoding, columns: int) -> None:
    form = fit_product_codes(drawn(20, columns), recipe)
    for index in (torch.tensor([[0, 5], [3, 3]]), torch.tensor(2)):
        assert torch.allclose(form.rows(index), form.dense()[index], atol=1e-6)


def test_codes_of_more_than_eight_bits_reach_all_entries() -> None:
    weight = drawn(200, 8)
    form = fit_product_codes(
        weight, VectorCoding(length=2, bits=10, rounds=0)
    )  # 800 vectors, 1024 entries: each is its own
    assert torch.allclose(form.dense(), weight, atol=2e-3)


def test_the_same_input_gives_the_same_bits() -> None:
    weight = drawn(64, 32)
    for recipe in (
        SMALL,
        replace(SMALL, stages=2),
        replace(SMALL, stages=2, method="local search"),
        replace(SMALL, rotation=8),
    ):
        one, two = (fit_product_codes(weight, recipe).tensors() for _ in range(2))
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_weighted_error_falls_and_the_plain_one_pays() -> None:
    weight, importance = (
        drawn(128, 32),
        torch.logspace(-2, 1, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(1))],
    )
    for recipe in (VectorCoding(2, 6), VectorCoding(4, 6, stages=2)):
        plain, weighted = fit_product_codes(weight, recipe), fit_product_codes(weight, recipe, importance)
        assert error(weighted, weight, importance) < 0.95 * error(plain, weight, importance)
        assert error(weighted, weight) > error(plain, weight)


def test_two_stages_are_better_than_one_and_vectors_than_numbers_apart() -> None:
    weight = drawn(256, 32)
    assert error(fit_product_codes(weight, VectorCoding(4, 5, stages=2)), weight) < error(
        fit_product_codes(weight, VectorCoding(4, 5)), weight
    )
    corners = drawn(256, 16).sign().repeat_interleave(2, 1) + 0.01 * drawn(256, 32)  # neighbours are alike
    assert error(fit_product_codes(corners, VectorCoding(2, 2)), corners) < 0.01 * corners.numel()


def test_a_rotation_helps_where_numbers_go_together() -> None:
    mixed = drawn(600, 8) * torch.tensor([4.0, 4.0, 4.0, 4.0, 0.1, 0.1, 0.1, 0.1])
    turn = torch.linalg.qr(drawn(8, 8, seed=5)).Q
    plain, turned = (
        fit_product_codes(mixed @ turn, VectorCoding(2, 4, books=0, rotation=rotation)) for rotation in (0, 8)
    )
    assert error(turned, mixed @ turn) < error(plain, mixed @ turn)


def test_the_beam_finds_the_best_code_and_tables_are_means() -> None:
    vectors, weights, tables = drawn(50, 3), drawn(50, 3, seed=1).square(), drawn(1, 8, 3, seed=2)
    codes = encode(vectors, weights, tables)
    every = (weights[:, None] * (vectors[:, None] - tables[0]).square()).sum(-1)
    assert torch.equal(codes[:, 0], every.argmin(1))
    better = refit_tables(vectors, weights, codes, tables)
    assert error_of(vectors, weights, codes, better) < error_of(vectors, weights, codes, tables)
    two = drawn(2, 8, 3, seed=3)
    assert error_of(
        vectors,
        weights,
        encode(vectors, weights, alternate_codes_and_tables(vectors, weights, two, 5)),
        alternate_codes_and_tables(vectors, weights, two, 5),
    ) <= error_of(vectors, weights, encode(vectors, weights, two.half().float()), two.half().float())


def test_a_few_long_vectors_among_many_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.compression.quantization.product_codes.POINTS", 1 << 10)
    weight = drawn(100, 400)
    weight[7, :8] = torch.tensor([40.0, 40.0, -40.0, 40.0, -40.0, -40.0, 41.0, 0.0])
    assert (
        float((fit_product_codes(weight, VectorCoding(2, 6)).dense() - weight).abs().max()) < 25
    )  # one that is missed is off by 35


def test_a_constant_weight_comes_back() -> None:
    for recipe in RECIPES[:6]:
        assert torch.allclose(
            fit_product_codes(torch.full((16, 12), 0.5), recipe).dense(), torch.full((16, 12), 0.5), atol=2e-3
        )


@pytest.mark.parametrize(
    ("recipe", "weight", "importance", "said"),
    [
        (SMALL, torch.full((4, 4), torch.nan), None, "not finite"),
        (SMALL, torch.full((4, 4), 1e9), None, "float16"),
        (replace(SMALL, rotation=3), torch.ones(4, 6), None, "rotation of whole vectors"),
        (replace(SMALL, books=4), torch.ones(4, 6), None, "4 codebooks for 3 vectors"),
        (replace(SMALL, bits=13), torch.ones(4, 6), None, "13 bits"),
        (replace(SMALL, rotation=4), torch.ones(4, 8), torch.arange(1.0, 9.0), "scaled=True"),
        (replace(SMALL, method="guess"), torch.ones(4, 8), None, "residual, additive, local search"),
    ],
)
def test_what_can_not_be_coded_is_refused(
    recipe: VectorCoding, weight: Tensor, importance: Tensor | None, said: str
) -> None:
    with pytest.raises(Mistake, match=said):
        fit_product_codes(weight, recipe, importance)


def test_codebooks_are_as_good_as_those_of_faiss() -> None:
    faiss = pytest.importorskip("faiss")
    weight = drawn(512, 32) @ (drawn(32, 32, seed=1) * torch.logspace(0, -1, 32)[:, None])
    vectors = weight.view(-1, 4).numpy()

    def of_faiss(quantizer: Any, points: Any) -> float:
        quantizer.train(points)
        return float(((quantizer.decode(quantizer.compute_codes(points)) - points) ** 2).sum())

    for recipe, wanted in (
        (VectorCoding(4, 6), of_faiss(faiss.ProductQuantizer(4, 1, 6), vectors)),
        (VectorCoding(4, 6, stages=2), of_faiss(faiss.ResidualQuantizer(4, 2, 6), vectors)),
        (VectorCoding(4, 6, stages=2, method="additive"), of_faiss(faiss.ResidualQuantizer(4, 2, 6), vectors)),
        (VectorCoding(4, 6, stages=2, method="local search"), of_faiss(faiss.ResidualQuantizer(4, 2, 6), vectors)),
        (VectorCoding(4, 4, books=0), of_faiss(faiss.ProductQuantizer(32, 8, 4), weight.numpy())),
    ):
        assert error(fit_product_codes(weight, recipe), weight) < 1.05 * wanted, recipe


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stores_a_weight_whose_inputs_are_known_and_one_whose_inputs_are_not(kind: str) -> None:
    """OPQ refused weights whose inputs are known, the refusal was swallowed, and everything was stored as it is, at fidelity 1."""
    for name in ("mlp", "lstm"):
        source, given, cost = studied(name)
        outcome = plan_compression(
            cost, source.model, given.checked, (f"ProductQuantize(kind={kind!r}, length=2, bits=3)",)
        )
        there = [layer for layer in outcome.chosen.details.layers() if layer["technique"] == "ProductQuantize"]
        assert there and all(layer["bits"] < 32 for layer in there) and outcome.chosen.numbers()["quality"] < 1


def test_a_technique_that_can_store_nothing_is_refused_and_what_it_leaves_is_told() -> None:
    source, given, cost = studied("mlp")
    with pytest.raises(
        Mistake, match=r"can store no weight of this model: .*fewer vectors than a 12-bit codebook has entries"
    ):
        plan_compression(cost, source.model, given.checked, ("ProductQuantize(bits=12)",))
    outcome = plan_compression(cost, source.model, given.checked, ("ProductQuantize(length=2, bits=7)",))
    left = [layer for layer in outcome.chosen.details.layers() if not layer["technique"] and len(layer["shape"]) > 1]
    assert left and any("ProductQuantize left " + left[0]["name"] in note for note in outcome.chosen.details.cost.notes)
