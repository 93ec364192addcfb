"""A cut model computes what the whole one does in which the removed units are masked to zero."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.pruning.choose import Pruning, pruning_for
from shoestring.compression.pruning.prune_edits import (
    Drop,
    PruneEdit,
    UnitCut,
    apply_prune_edits,
    prune_edits_from_json,
    prune_edits_to_json,
)

from .models import CASES


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().eval()


@cache
def pruned(name: str) -> Pruning:
    return pruning_for(made(name), lambda one: CASES[name].run(one, 2), CASES[name].shares)


def masked_output(model: nn.Module, edits: tuple[PruneEdit, ...], name: str, batch: int) -> Tensor:
    """Of a copy in which every weight that reads a removed unit is zero, and every dropped block gives back what it is given."""
    whole = copy.deepcopy(model)
    weights = dict(whole.named_parameters())
    cuts = [edit for edit in edits if isinstance(edit, UnitCut)]
    for cut in cuts:
        for place in cut.places:
            if place.weight in cut.readers:
                here = (place.weight, place.dim)
                assert sum(here == (one.weight, one.dim) for other in cuts for one in other.places) == 1, (
                    "one cut a dimension"
                )
                kept = torch.zeros(place.outer, cut.size, place.inner)
                kept[:, list(cut.kept)] = 1
                shape = [-1 if dim == place.dim else 1 for dim in range(weights[place.weight].dim())]
                weights[place.weight].data.mul_(kept.flatten().view(shape))
    for edit in edits:
        if isinstance(edit, Drop):
            container: nn.ModuleList = whole.get_submodule(edit.container)  # type: ignore[assignment]
            for gone in set(range(edit.size)) - set(edit.kept):
                container[gone].register_forward_hook(
                    lambda module, given, output: (given[0], *output[1:]) if isinstance(output, tuple) else given[0]
                )
    return CASES[name].run(whole, batch)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_model_computes_what_the_masked_one_does(name: str) -> None:
    case, model = CASES[name], made(name)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    pruning = pruned(name)
    smaller = apply_prune_edits(model, prune_edits_from_json(prune_edits_to_json(pruning.edits)))
    kinds = {
        "layers" if isinstance(edit, Drop) else edit.kind for edit in pruning.edits if isinstance(edit, (UnitCut, Drop))
    }
    assert kinds == set(case.shares), pruning.told
    with torch.no_grad():
        for batch in (2, 3):  # other sizes than those it was found with
            wanted, found = masked_output(model, pruning.edits, name, batch), case.run(smaller, batch)
            assert (wanted - case.run(model, batch)).abs().max() > 1e-4, "the mask does something"
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items()), (
        "the given model is not changed"
    )
    count = [sum(weight.numel() for weight in one.parameters()) for one in (model, smaller)]
    assert count[1] < 0.9 * count[0]


@pytest.mark.parametrize("name", CASES)
def test_a_model_just_made_gets_the_same_shapes_and_can_be_filled(name: str) -> None:
    case, model = CASES[name], made(name)
    edits = pruned(name).edits
    smaller = apply_prune_edits(model, edits)
    with torch.device("meta"):
        empty = apply_prune_edits(case.make(), edits).eval()
    shapes, wanted = ({key: value.shape for key, value in one.state_dict().items()} for one in (empty, smaller))
    assert shapes == wanted
    torch.manual_seed(7)
    filled = apply_prune_edits(case.make(), edits).eval()
    filled.load_state_dict(smaller.state_dict())
    with torch.no_grad():
        assert torch.equal(case.run(filled, 3), case.run(smaller, 3))


def test_a_cut_model_trains_with_dropout_and_steps() -> None:
    case, model = CASES["encoder"], made("encoder")
    smaller = apply_prune_edits(model, pruned("encoder").edits).train()
    case.run(smaller, 2).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in smaller.parameters())


def test_tied_weights_stay_tied() -> None:
    model = made("llama")
    smaller = apply_prune_edits(model, pruned("llama").edits)
    assert smaller.lm_head.weight is smaller.model.embed_tokens.weight  # type: ignore[union-attr]


def test_a_cut_llama_still_generates_with_its_cache() -> None:
    model = made("llama")
    smaller = apply_prune_edits(model, pruned("llama").edits)
    start = torch.tensor([[3, 1, 4]])
    cached, plain = (smaller.generate(start, max_new_tokens=5, do_sample=False, use_cache=use) for use in (True, False))  # type: ignore[operator]
    assert torch.equal(cached, plain)


def test_padded_rows_of_an_encoder_are_cut_and_told() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 5, 24), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    pruning = pruning_for(model, lambda one: one(x, src_key_padding_mask=padding), {"heads": 0.5})
    assert any("padded" in line for line in pruning.told)
    whole = copy.deepcopy(model)
    for cut in pruning.edits:
        if isinstance(cut, UnitCut):
            gone = [unit * 6 + place for unit in range(4) if unit not in cut.kept for place in range(6)]
            whole.get_parameter(cut.readers[0]).data[:, gone] = 0
    with torch.no_grad():
        found, wanted = (
            apply_prune_edits(model, pruning.edits)(x, src_key_padding_mask=padding),
            whole(x, src_key_padding_mask=padding),
        )
    torch.testing.assert_close(found[~padding], wanted[~padding], atol=1e-5, rtol=1e-5)
