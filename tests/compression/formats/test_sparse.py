"""Sparse storage: a bitmap or a seed, and any form of what is left."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.formats.format import PlainFormat, WeightFormat
from shoestring.compression.formats.grid import GridFormat
from shoestring.compression.formats.kinds import KINDS
from shoestring.compression.formats.packed_modules import place_formats
from shoestring.compression.formats.product import ProductFormat
from shoestring.compression.formats.sparse import SparseFormat, seeded_mask
from shoestring.compression.quantization.product_codes import VectorCoding, fit_product_codes
from shoestring.compression.quantization.rounding import GridSetting, round_to_grid
from shoestring.compression.quantization.scalar_codes import fit_codebook
from shoestring.core.errors import Mistake
from shoestring.core.model.masks import seed_mask

Inner = Callable[[Tensor], WeightFormat]


def gridded(values: Tensor) -> WeightFormat:
    (one,) = round_to_grid(values[None], [GridSetting(4, 16)])
    return GridFormat.of(one.codes, one.scales, one.zeros, 4, 16, tuple(values.shape), values.dtype)


INNERS: dict[str, Inner] = {
    "plain": PlainFormat.of,
    "half": lambda values: PlainFormat.of(values, "float16"),
    "grid": gridded,
    "codebook": lambda values: fit_codebook(values, 4, 8),
    "product": lambda values: fit_product_codes(values, VectorCoding(2, 3, rounds=0)),
}
SHAPES = [(17,), (8, 12), (1, 9), (9, 1), (6, 3, 3, 3)]


@pytest.fixture(autouse=True)
def all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CodebookFormat, ProductFormat, SparseFormat):
        monkeypatch.setitem(KINDS, kind.kind, kind)


def cut(*shape: int, share: float = 0.6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight * (torch.rand(shape, generator=generator) < 1 - share)


def checked(form: SparseFormat, weight: Tensor) -> None:
    """Sizes, and what a file gives back; settings go through JSON."""
    tensors = load(save({name: one.contiguous() for name, one in form.tensors().items()}))
    assert form.stored_bytes == sum(one.numel() * one.element_size() for one in tensors.values())
    again = SparseFormat(tuple(weight.shape), weight.dtype, json.loads(json.dumps(form.settings)), tensors)
    assert (
        torch.equal(again.dense(), form.dense())
        and form.dense().shape == weight.shape
        and form.dense().dtype == weight.dtype
    )
    assert bool((form.dense()[weight == 0] == 0).all())


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_left_is_stored_in_any_form(inner: str, shape: tuple[int, ...]) -> None:
    weight = cut(*shape)
    form = SparseFormat.of(weight, INNERS[inner])
    checked(form, weight)
    exact = INNERS[inner](weight[weight != 0])
    assert torch.equal(form.dense()[weight != 0], exact.dense())
    assert form.stored_bytes == -(-weight.numel() // 8) + exact.stored_bytes


@pytest.mark.parametrize("seeded", [False, True])
def test_nothing_and_everything_can_be_left(seeded: bool) -> None:
    for weight, kept in ((torch.zeros(5, 7), 0), (torch.ones(5, 7), 35)):
        form = (
            SparseFormat.of_seed(weight, PlainFormat.of, kept, 3) if seeded else SparseFormat.of(weight, PlainFormat.of)
        )
        checked(form, weight)
        assert torch.equal(form.dense(), weight) and form.settings["kept"] == kept
    empty = GridFormat(
        (0,),
        torch.float32,
        {"bits": 4, "group": 16},
        {
            name: torch.zeros(part.shape, dtype=part.dtype)
            for name, part in GridFormat.layout((0,), torch.float32, {"bits": 4, "group": 16}).items()
        },
    )
    checked(SparseFormat.of(torch.zeros(5, 7), lambda values: empty), torch.zeros(5, 7))


def test_a_mask_that_was_drawn_takes_no_bytes() -> None:
    mask = seed_mask((30, 41), share=0.9, seed=11)
    weight = cut(30, 41, share=0) * mask
    form = SparseFormat.of_seed(weight, PlainFormat.of, int(mask.sum()), 11)
    checked(form, weight)
    assert torch.equal(form.dense(), weight)
    assert form.stored_bytes == 4 * int(mask.sum())
    assert torch.equal(seeded_mask((30, 41), int(mask.sum()), 11), mask)
    assert "mask" not in form.tensors()


def test_a_seed_that_lies_is_refused() -> None:
    weight = torch.randn(20, 20) * seeded_mask((20, 20), 40, 1)
    form = SparseFormat.of_seed(weight, PlainFormat.of, 40, 1)
    other = SparseFormat((20, 20), torch.float32, {**form.settings, "seed": 2}, form.tensors())
    with pytest.raises(Mistake, match="now gives another mask"):
        other.dense()
    with pytest.raises(Mistake, match="would be lost"):
        SparseFormat.of_seed(weight, PlainFormat.of, 40, 2)
    with pytest.raises(Mistake, match="from 0 to 400"):
        seeded_mask((20, 20), 401, 0)


def test_a_file_that_does_not_fit_is_refused() -> None:
    form = SparseFormat.of(cut(8, 8), PlainFormat.of)
    for change in (
        {"kept": form.settings["kept"] + 1},
        {"kept": -1},
        {"kept": 65},
        {"inner": "nothing"},
        {"inner": "sparse"},
    ):
        with pytest.raises(ValueError, match=r"sparse|kept"):
            SparseFormat((8, 8), torch.float32, {**form.settings, **change}, form.tensors())
    with pytest.raises(ValueError, match="mask"):
        SparseFormat((8, 9), torch.float32, form.settings, form.tensors())


def test_a_bitmap_whose_bits_are_not_as_many_as_the_numbers_is_refused() -> None:
    form = SparseFormat.of(cut(8, 8), PlainFormat.of)
    tensors = {**form.tensors(), "mask": torch.full((8,), 255, dtype=torch.uint8)}
    with pytest.raises(Mistake, match="bitmap"):
        SparseFormat((8, 8), torch.float32, form.settings, tensors).dense()


def test_a_model_computes_from_it_and_can_be_copied() -> None:
    layer = nn.Linear(12, 8)
    layer.weight.data.copy_(cut(8, 12))
    expected = layer(torch.ones(2, 12))
    model = place_formats(nn.Sequential(layer), {"0.weight": SparseFormat.of(layer.weight, PlainFormat.of)})
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(one(torch.ones(2, 12)), expected)


def test_rows_are_looked_up() -> None:
    weight = cut(9, 4)
    assert torch.equal(
        SparseFormat.of(weight, PlainFormat.of).rows(torch.tensor([[1, 8]])), weight[torch.tensor([[1, 8]])]
    )
