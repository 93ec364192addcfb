"""Factorized layers: values, names, sizes, and what is left alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.factorization.chains import LowRankLinear, TrainEmbedding
from shoestring.compression.factorization.choose import edits_for, factorization_for
from shoestring.compression.factorization.factor_edits import (
    LowRankEdit,
    TensorTrainEdit,
    TuckerEdit,
    apply_factor_edits,
    factor_edits_from_json,
    factor_edits_to_json,
    fit_factors,
)
from shoestring.compression.factorization.ranks import (
    three_factors,
    three_factors_at_least,
    train_numbers,
    train_ranks,
    tucker_numbers,
    tucker_ranks,
)
from shoestring.compression.factorization.values import low_rank, tensor_train, tucker
from shoestring.core.errors import Mistake


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


# values


def test_the_error_of_a_rank_is_what_the_spectrum_says() -> None:
    weight = drawn(20, 30)
    left, right = low_rank(weight, 7)
    expected = torch.linalg.svdvals(weight)[7:].square().sum().sqrt()
    assert torch.allclose((weight - left @ right).norm(), expected, rtol=1e-4)


def test_in_the_metric_of_inputs_no_factors_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.compression.factorization.values.DAMPING", 1e-9)
    weight, inputs = drawn(20, 30), drawn(500, 30, seed=1) * torch.logspace(-2, 1, 30)
    moment = inputs.T @ inputs
    plain, ours = low_rank(weight, 5), low_rank(weight, 5, moment)

    def damage(pair: tuple[Tensor, Tensor]) -> float:
        return float((inputs @ (weight - pair[0] @ pair[1]).T).square().sum())

    assert damage(ours) < 0.5 * damage(plain)
    least = float(torch.linalg.svdvals(inputs @ weight.T)[5:].square().sum())  # of any outputs of rank 5
    assert least <= damage(ours) < 1.01 * least


def test_moments_without_rank_or_of_another_layer() -> None:
    weight = drawn(6, 8)
    for moment in (torch.zeros(8, 8), torch.ones(8, 8)):
        left, right = low_rank(weight, 6, moment)
        assert torch.allclose(left @ right, weight, atol=1e-5)
    with pytest.raises(Mistake, match="different layers"):
        low_rank(weight, 2, torch.eye(9))
    with pytest.raises(Mistake, match="finite"):
        low_rank(weight, 2, torch.full((8, 8), torch.nan))


@pytest.mark.parametrize("moment", [None, "channels", "patches"])
def test_full_ranks_of_tucker_give_the_weight_back_and_low_ones_what_has_them(moment: str | None) -> None:
    weight = drawn(6, 5, 3, 2)
    inputs = drawn(100, 5 * (6 if moment == "patches" else 1), seed=2)
    metric = None if moment is None else inputs.T @ inputs
    left, core, right = tucker(weight, (6, 5), metric)
    assert torch.allclose(torch.einsum("op,pqhw,qi->oihw", left, core, right), weight, atol=1e-4)
    low = torch.einsum("op,pqhw,qi->oihw", drawn(6, 2), drawn(2, 3, 3, 2, seed=1), drawn(3, 5, seed=2))
    left, core, right = tucker(low, (2, 3), metric)
    assert torch.allclose(torch.einsum("op,pqhw,qi->oihw", left, core, right), low, atol=1e-4)
    with pytest.raises(Mistake, match="of its channels"):
        tucker(weight, (2, 2), torch.eye(7))


def test_full_ranks_of_a_train_give_the_table_back() -> None:
    table = drawn(23, 12)
    rows, columns = three_factors_at_least(23), three_factors(12)
    ranks = train_ranks(rows, columns, 10**9)
    layer = TrainEmbedding(23, rows, columns, ranks)
    for core, value in zip(layer.cores, tensor_train(table, rows, columns, ranks), strict=True):
        core.data.copy_(value)
    assert torch.allclose(layer.weight, table, atol=1e-5)
    index = torch.tensor([[0, 22, 7], [3, 3, 1]])
    assert torch.allclose(layer(index), table[index], atol=1e-5)
    assert layer(torch.zeros(0, dtype=torch.int64)).shape == (0, 12)
    for wrong in (23, -1):
        with pytest.raises(IndexError, match="out of range"):
            layer(torch.tensor([wrong]))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30, 100, 997, 30522, 50257])
def test_factors_cover_a_number_closely(count: int) -> None:
    rows, columns = three_factors_at_least(count), three_factors(count)
    assert count <= rows[0] * rows[1] * rows[2] <= 1.5 * count + 1 and columns[0] * columns[1] * columns[2] == count


# edits


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, (3, 5), padding="same", dilation=2),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(24, 32, 1, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10, bias=False)), (4, 20)),
    "conv": (conv_net(), (2, 3, 17, 16)),
    "one layer": (nn.Linear(20, 30), (4, 20)),
}


@pytest.mark.parametrize("case", CASES)
def test_full_ranks_compute_the_same_and_a_share_is_never_exceeded(case: str) -> None:
    model, shape = CASES[case]
    before, inputs = copy.deepcopy(model), drawn(*shape)
    for share in (0.3, 0.6, 0.9):
        edits = edits_for(model, lambda one: one(inputs), share=share)
        smaller = fit_factors(model, edits)
        for edit in edits:
            old, new = model.get_submodule(edit.module), smaller.get_submodule(edit.module)
            bias = 0 if old.bias is None else old.bias.numel()
            assert numbers(new) - bias <= share * old.weight.numel(), edit
            assert new.weight.shape == old.weight.shape and (new.bias is None) == (old.bias is None)
        fresh = apply_factor_edits(
            copy.deepcopy(model).to("meta"), factor_edits_from_json(json.loads(json.dumps(factor_edits_to_json(edits))))
        )
        assert shapes(fresh) == shapes(smaller)
        assert smaller(inputs).shape == model(inputs).shape
    full = [
        LowRankEdit(edit.module, min(model.get_submodule(edit.module).weight.shape[:2]))
        if isinstance(edit, LowRankEdit)
        else TuckerEdit(edit.module, tuple(model.get_submodule(edit.module).weight.shape[:2]))
        for edit in edits
    ]  # type: ignore[arg-type]
    assert torch.allclose(fit_factors(model, full)(inputs), model(inputs), atol=1e-4)
    assert all(
        torch.equal(one, two)
        for one, two in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )


def test_whoever_reads_the_weight_gets_the_product() -> None:
    layer = nn.Linear(8, 6)
    smaller: Any = fit_factors(layer, [LowRankEdit("", 2)])
    inputs = drawn(3, 8)
    assert isinstance(smaller, LowRankLinear) and (smaller.in_features, smaller.out_features) == (8, 6)
    assert torch.allclose(smaller(inputs), nn.functional.linear(inputs, smaller.weight, smaller.bias), atol=1e-6)
    smaller(inputs).sum().backward()
    assert all(one.grad is not None for one in smaller.parameters())


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_goes_on_to_work_and_its_inner_weight_is_told(batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, dropout=0.0).eval()
    inputs = drawn(3, 5, 16)
    found = factorization_for(model, lambda one: one(inputs), share=0.6)
    assert {edit.module for edit in found.edits} == {"self_attn.out_proj", "linear1", "linear2"}
    assert any("in_proj" in text for text in found.told)
    smaller = fit_factors(model, found.edits)
    with torch.no_grad():
        fast = smaller(inputs)
    smaller.train()  # without torch's fast path
    assert torch.allclose(fast, smaller(inputs), atol=1e-5)
    full = fit_factors(model, [LowRankEdit(edit.module, 16) for edit in found.edits])
    assert torch.allclose(full(inputs), model(inputs), atol=1e-4)


def bert() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(
        BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    ).eval()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            tie_word_embeddings=True,
        )
    ).eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()


@pytest.mark.parametrize("make", [bert, llama, gpt2])
def test_transformers_go_on_to_work(make: Any) -> None:
    model, tokens = make(), torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(0))
    found = factorization_for(model, lambda one: one(tokens), share=0.7, kinds=("linear", "embedding"))
    smaller = fit_factors(model, found.edits)
    assert numbers(smaller) < numbers(model) and len(found.edits) > 4
    tied = [text for text in found.told if "tied" in text]
    assert bool(tied) == (make is not bert)
    assert smaller(tokens)[0].shape == model(tokens)[0].shape
    full = [LowRankEdit(edit.module, 16) for edit in found.edits if isinstance(edit, LowRankEdit)]
    assert torch.allclose(fit_factors(model, full)(tokens)[0], model(tokens)[0], atol=1e-4)
    with torch.device("meta"):
        fresh = make()
    assert shapes(apply_factor_edits(fresh, found.edits)) == shapes(smaller)


def test_a_layer_that_is_there_twice_stays_one() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    smaller: Any = fit_factors(model, edits_for(model, share=0.5))
    assert smaller[0] is smaller[2] and smaller(drawn(2, 16)).shape == (2, 16)


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class Picky(nn.Module):
    """Reads what only a linear layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.one, nn.Linear)
        return self.two(self.one(x))


def test_what_is_left_alone_is_told() -> None:
    tied = nn.ModuleDict({"words": nn.Embedding(50, 16), "out": nn.Linear(16, 50, bias=False), "fc": nn.Linear(16, 16)})
    tied["out"].weight = tied["words"].weight
    found = factorization_for(tied, share=0.5, kinds=("linear", "embedding"))
    assert [edit.module for edit in found.edits] == ["fc"] and sum("tied" in text for text in found.told) == 2
    many = nn.ModuleDict(
        {
            "odd": Odd(16, 16),
            "grouped": nn.Conv2d(8, 8, 3, groups=2),
            "small": nn.Linear(16, 1),
            "fc": nn.Linear(16, 16),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "lazy": nn.LazyLinear(3),
            "limited": nn.Embedding(50, 16, max_norm=1.0),
        }
    )
    found = factorization_for(many, share=0.5, kinds=("linear", "convolution", "embedding"))
    assert [edit.module for edit in found.edits] == ["fc"]
    for word in ("forward of its own", "groups", "not enough for rank 1", "parametrized", "max_norm"):
        assert any(word in text for text in found.told), word
    found = factorization_for(nn.ModuleDict({"fc": nn.Linear(16, 16), "wide": nn.Linear(64, 64)}), rank=8)
    assert [edit.module for edit in found.edits] == ["wide"] and "saves nothing" in found.told[0]
    found = factorization_for(Picky(), lambda one: one(drawn(2, 16)), share=0.5)
    assert [edit.module for edit in found.edits] == ["two"] and "does not run" in found.told[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"share": 0.5, "rank": 3},
        {"share": 1.0},
        {"share": 0.0},
        {"rank": 0},
        {"share": 0.5, "kinds": ("norms",)},
        {"share": 0.001},
        {"share": 0.5, "kinds": ("embedding",)},
    ],
)
def test_what_makes_no_factorization_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(Mistake):
        edits_for(nn.Sequential(nn.Linear(8, 8)), **settings)


def test_edits_of_another_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(50, 8))
    for edit in (
        LowRankEdit("5", 2),
        LowRankEdit("1", 2),
        TuckerEdit("0", (2, 2)),
        TensorTrainEdit("1", (2, 2, 2), (2, 2, 2), (2, 2)),
    ):
        with pytest.raises(Mistake, match="another model"):
            apply_factor_edits(model, [edit])
    with pytest.raises(Mistake, match="meta device"):
        fit_factors(nn.Linear(8, 8, device="meta"), [LowRankEdit("", 2)])
    good = factor_edits_to_json([LowRankEdit("0", 2)])
    for bad in ({}, [{"edit": "Guess"}], [{**good[0], "rank": 0}], [{"edit": "LowRank"}], [{**good[0], "rank": "two"}]):
        with pytest.raises(Mistake, match="manifest was changed"):
            factor_edits_from_json(bad)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_ranks_fill_a_share_and_do_not_exceed_it(share: float) -> None:
    for inputs, outputs, pixels in ((64, 128, 9), (16, 16, 25), (3, 200, 9)):
        count, ranks = inputs * outputs * pixels, tucker_ranks(inputs, outputs, pixels, share)
        assert tucker_numbers(inputs, outputs, pixels, ranks) <= share * count
        assert tucker_numbers(inputs, outputs, pixels, (ranks[0] + 1, ranks[1] + 1)) > share * count
    rows, columns = three_factors_at_least(30522), three_factors(384)
    most = int(share * 30522 * 384)
    assert 0.97 * most < train_numbers(rows, columns, train_ranks(rows, columns, most)) <= most


def test_chains_can_be_exported() -> None:
    model = nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 12)).eval()
    smaller = fit_factors(model, edits_for(model, share=0.6, kinds=("linear", "embedding")))
    index = torch.tensor([[1, 2, 49]])
    assert {type(one) for one in smaller} == {TrainEmbedding, LowRankLinear}
    assert torch.allclose(torch.export.export(smaller, (index,)).module()(index), smaller(index), atol=1e-6)


def test_types_modes_and_gradients_are_kept() -> None:
    layer = nn.Linear(16, 16, dtype=torch.bfloat16).eval().requires_grad_(False)
    smaller = fit_factors(layer, [LowRankEdit("", 3)])
    assert {one.dtype for one in smaller.parameters()} == {torch.bfloat16} and not smaller.training
    assert not any(one.requires_grad for one in smaller.parameters())
