"""The least-squares repair, and which units it wants to go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.pruning.choose import edits_for
from shoestring.compression.pruning.importance import METHODS, importance
from shoestring.compression.pruning.prune_edits import UnitCut, apply_prune_edits
from shoestring.compression.pruning.readers import Read
from shoestring.compression.pruning.repair import Fit, Judge, repair_of
from shoestring.core.errors import Mistake

from .models import CASES, draw


def forward(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)  # type: ignore[no-any-return]


def doubled(bias: bool = True) -> nn.Sequential:
    """Every second hidden unit repeats the one before: half of them can go without any loss, if the next layer is refitted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4, bias=bias))
    with torch.no_grad():
        for weight in (model[0].weight, model[0].bias):
            weight[1::2] = weight[::2] * 2
    return model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_repeated_units_go_without_loss(bias: bool, in_order: bool) -> None:
    model, batches = doubled(bias), [draw(64, 6), draw(65, 6)]
    scores = importance(model, batches, forward)
    edits = edits_for(model, lambda one: one(batches[0]), neurons=0.5, scores=scores)
    cut = next(edit for edit in edits if isinstance(edit, UnitCut))
    assert sorted(unit // 2 for unit in cut.kept) == list(range(8)), "one of each pair stays"
    wanted, before = model(draw(40, 6)), apply_prune_edits(model, edits)(draw(40, 6))
    after = repair_of(model, edits, batches, forward, damping=1e-6, in_order=in_order).model(draw(40, 6))
    assert (before - wanted).norm() > 0.2 * wanted.norm()
    assert (after - wanted).norm() < 0.01 * wanted.norm()


def test_a_repair_is_the_closed_form() -> None:
    """With no bias and the first layer only: W' = W M[:, kept] M[kept, kept]^-1."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3, bias=False)), draw(400, 6)
    edits = edits_for(model, lambda one: one(x), neurons=0.3)
    kept = list(next(edit for edit in edits if isinstance(edit, UnitCut)).kept)
    h = torch.tanh(model[0](x)).detach()
    moment = h.T @ h
    wanted = model[2].weight @ moment[:, kept] @ torch.linalg.inv(moment[kept][:, kept])
    found = repair_of(model, edits, [x], forward, damping=1e-9).model.get_parameter("2.weight")
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["mlp", "encoder", "attention", "bert", "gpt2", "llama", "tied"])
def test_a_repair_brings_outputs_nearer_and_leaves_the_model_alone(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make().eval()
    if name == "bert":  # a fresh BERT's weights are so small that only its skips count
        for weight in model.parameters():
            weight.data.mul_(5 if weight.dim() > 1 else 1)
    before = copy.deepcopy(model.state_dict())
    sizes = [8, 9, 10]
    shares = {kind: share for kind, share in case.shares.items() if kind != "layers"}
    edits = edits_for(model, lambda one: case.run(one, 8), **shares)
    fixed = repair_of(model, edits, sizes, case.run).model
    with torch.no_grad():
        wanted, cut, found = (
            torch.cat([case.run(one, size).flatten() for size in sizes])
            for one in (model, apply_prune_edits(model, edits), fixed)
        )
    assert (found - wanted).norm() < 0.9 * (cut - wanted).norm()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_repair_after_dropped_layers_refits_those_that_are_left() -> None:
    torch.manual_seed(0)
    case = CASES["encoder"]
    model = case.make().eval()
    edits = edits_for(model, lambda one: case.run(one, 8), **case.shares)
    assert case.run(repair_of(model, edits, [8, 9], case.run).model, 3).shape == (3, 5, 24)


@pytest.mark.parametrize("method", METHODS)
def test_units_without_effect_have_the_lowest_scores(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[2].weight[:, 4:12] = 0
    (scores,) = importance(model, [draw(32, 6)], forward, method=method).values()
    assert sorted(scores.argsort()[:8].tolist()) == list(range(4, 12))


def test_a_layer_that_does_nothing_leaves_first() -> None:
    torch.manual_seed(0)
    model = CASES["digits"].make().eval()
    nn.init.zeros_(model[3].work[4].weight)  # type: ignore[union-attr, index]
    nn.init.zeros_(model[3].work[4].bias)  # type: ignore[union-attr, index]
    scores = importance(model, [2], CASES["digits"].run)["layers "]
    assert int(scores.argmin()) == 3
    assert torch.isinf(scores[0]), "the first convolution is no block"


def test_importance_wants_batches_and_a_known_method() -> None:
    with pytest.raises(Mistake, match="at least one"):
        importance(doubled(), [], forward)
    with pytest.raises(Mistake, match="elimination, taylor, energy"):
        importance(doubled(), [draw(4, 6)], forward, method="magic")


def test_a_refit_that_brings_outputs_further_away_is_taken_back_and_told() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), draw(50, 6)
    wanted, before = model(x).detach() + 0.1, copy.deepcopy(model.state_dict())
    judge = Judge([{"output": wanted}], lambda: [{"output": model(x).detach()}])
    wrong, right = Fit(), Fit()
    wrong.add(x, -wanted, Read("weight", 1, x, model.bias))
    right.add(x, wanted, Read("weight", 1, x, model.bias))
    assert "undone" in judge.accept(wrong, model.weight, 1e-6)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert judge.accept(right, model.weight, 1e-6) == ""
    torch.testing.assert_close(model(x), wanted, atol=1e-4, rtol=1e-4)


def test_a_repair_leaves_every_module_in_its_mode() -> None:
    model = doubled().train()
    model[1].eval()
    edits = edits_for(model, lambda one: one(draw(8, 6)), neurons=0.5)
    found = repair_of(model, edits, [draw(64, 6)], forward)
    assert (
        [one.training for one in model.modules()]
        == [one.training for one in found.model.modules()]
        == [True, True, False, True]
    )
    assert found.told == ()


def test_what_convolutions_read_is_not_refitted_and_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    x = draw(2, 3, 8, 8)
    edits = edits_for(model, lambda one: one(x), channels=0.5)
    found = repair_of(model, edits, [x], forward)
    assert torch.equal(found.model(x), apply_prune_edits(model, edits)(x))
    assert found.told == ("2.weight: no matrix product reads it, so it is not refitted",)
