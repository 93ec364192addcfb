"""What can't be followed is left alone with the reason, and what can't work is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.pruning.choose import edits_for, pruning_for
from shoestring.compression.pruning.groups import structure_of
from shoestring.compression.pruning.prune_edits import (
    UnitCut,
    apply_prune_edits,
    prune_edits_from_json,
    prune_edits_to_json,
)
from shoestring.core.errors import Mistake


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for one, other in pairwise(widths) for part in (nn.Linear(one, other), nn.Tanh())))


def run(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 12).view(3, 4))  # type: ignore[no-any-return]


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(Mistake, match="from 0 to less than 1"):
        edits_for(mlp(4, 8, 2), run, neurons=share)


def test_nothing_asked_and_nothing_found_are_refused_with_the_reason() -> None:
    with pytest.raises(Mistake, match="give a share"):
        edits_for(mlp(4, 8, 2), run)
    with pytest.raises(Mistake, match=r"no heads that can be removed.*it has neurons"):
        edits_for(mlp(4, 8, 2), run, heads=0.5)
    with pytest.raises(Mistake, match="less than one unit"):
        edits_for(mlp(4, 8, 2), run, neurons=0.01)


class Odd(nn.Module):
    """A hidden width that is looked at in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 8), nn.Linear(8, 2), how
        self.loose = torch.linspace(1, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        match self.how:
            case "norm":
                h = nn.functional.layer_norm(h, (8,))
            case "sum":
                h = h * h.sum(1, keepdim=True)
            case "sort":
                h = h.sort(1).values
            case "constant":
                h = h * torch.arange(8.0)
            case "outside":
                h = h * self.loose
            case "flip":
                h = h + h.flip(1)
            case "slice":
                h = torch.cat([h[:, :3], h[:, 3:] * 2], 1)
            case "product":
                h = h * (h @ h.T).sum(1, keepdim=True)
            case "scaled":
                h = h / len(self.first.weight) ** 0.5
            case "rebuilt":
                h = h.reshape(-1).view(len(x), 8)
        return self.last(h)


@pytest.mark.parametrize(
    "how", ["norm", "sum", "sort", "constant", "outside", "flip", "slice", "product", "scaled", "rebuilt"]
)
def test_a_width_that_something_else_depends_on_is_left_alone(how: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(Mistake) as told:
        edits_for(Odd(how), run, neurons=0.5)
    assert "first.weight" in str(told.value)


def test_the_same_layers_without_the_oddity_are_cut() -> None:
    torch.manual_seed(0)
    assert any(isinstance(edit, UnitCut) for edit in edits_for(Odd("plain"), run, neurons=0.5))


def test_a_zero_weight_hides_no_mistake() -> None:
    model = Odd("scaled")
    nn.init.zeros_(model.last.weight)  # every cut looks right on these weights
    with pytest.raises(Mistake):
        edits_for(model, run, neurons=0.5)


def test_what_is_left_alone_is_told_beside_what_is_cut() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.odd = mlp(4, 8, 4), Odd("scaled")

        def forward(self, x: Tensor) -> Tensor:
            return self.odd(self.plain(x))  # type: ignore[no-any-return]

    pruning = pruning_for(Two(), run, {"neurons": 0.5})
    names = [edit.name for edit in pruning.edits if isinstance(edit, UnitCut)]
    assert names == ["neurons plain.0.weight:0", "neurons plain.2.weight:0"]
    assert any(line.startswith("neurons odd.first.weight:0") for line in pruning.told)


def test_a_model_that_draws_random_numbers_is_refused_only_if_they_change() -> None:
    class Noisy(nn.Module):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.inside = mlp(4, 8, 2)

        def forward(self, x: Tensor) -> Tensor:
            Noisy.count += 1
            return self.inside(x) + Noisy.count  # type: ignore[no-any-return]

    with pytest.raises(Mistake, match="other outputs when it is called again"):
        edits_for(Noisy(), run, neurons=0.5)


def test_edits_of_another_model_are_refused() -> None:
    edits = edits_for(mlp(4, 8, 2), run, neurons=0.5)
    with pytest.raises(Mistake, match="another model"):
        apply_prune_edits(mlp(4, 6, 2), edits)
    with pytest.raises(Mistake, match="another model"):
        apply_prune_edits(nn.Linear(4, 2), edits)


@pytest.mark.parametrize(
    "change",
    [
        {"kept": "fff"},
        {"kept": "0"},
        {"kept": "xyz"},
        {"size": "many"},
        {"edit": "Exec"},
        {"kind": "toes"},
        {"places": [{"weight": "0.weight", "dim": -1, "outer": 1, "inner": 1}]},
        {"more": 1},
    ],
)
def test_a_manifest_that_lies_is_refused(change: dict[str, object]) -> None:
    data = prune_edits_to_json(edits_for(mlp(4, 8, 2), run, neurons=0.5))
    with pytest.raises(Mistake):
        prune_edits_from_json([{**data[0], **change}, *data[1:]])


def test_scores_decide_which_units_go_and_must_fit() -> None:
    model = mlp(4, 8, 2)
    name = structure_of(model, run).groups[0].name
    scores = {name: torch.tensor([5.0, 1, 6, 2, 7, 3, 8, 4])}
    cut = next(edit for edit in edits_for(model, run, neurons=0.5, scores=scores) if isinstance(edit, UnitCut))
    assert cut.kept == (0, 2, 4, 6)
    with pytest.raises(Mistake, match="missing or not 8"):
        edits_for(model, run, neurons=0.5, scores={name: torch.ones(3)})


def test_a_global_choice_takes_from_the_least_important_group_and_leaves_a_floor() -> None:
    model = mlp(4, 8, 8, 2)
    first, second = (group.name for group in structure_of(model, run).groups)
    scores = {first: torch.arange(8.0) + 100, second: torch.arange(8.0)}

    def kept(share: float) -> dict[str, tuple[int, ...]]:
        edits = edits_for(model, run, neurons=share, scores=scores, spread="global", floor_share=0.25)
        return {edit.name: edit.kept for edit in edits if isinstance(edit, UnitCut)}

    assert kept(0.4) == {second: (6, 7)}, "all six that may go are of the second"
    assert kept(0.5) == {second: (6, 7), first: (2, 3, 4, 5, 6, 7)}
