"""Files of tensors: what is written is read back with every bit, by others too, and what is cut or made up is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.runs.weights.tensors import DTYPES, PIECE, TensorFile, UnreadableTensors, write_tensors
from tests.mutations import variants

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
ON_DISK = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaN and subnormal numbers too; a bool is 0 or 1."""
    chance = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=chance, dtype=torch.uint8
    )
    return raw.view(dtype).reshape(shape)


@ON_DISK
@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES, st.booleans()), max_size=5),
    st.integers(0, 99),
)
def test_every_bit_comes_back(
    tmp_path: Path, kinds: dict[str, tuple[torch.dtype, tuple[int, ...], bool]], seed: int
) -> None:
    tensors = {}
    for name, (dtype, shape, turned) in kinds.items():
        one = made(dtype, shape, seed)
        tensors[name] = one.mT if turned and one.dim() > 1 else one
    size = write_tensors(tmp_path / "a", tensors, {"alias one": "other"})
    assert size == (tmp_path / "a").stat().st_size
    found = TensorFile(tmp_path / "a")
    assert list(found) == list(tensors) and found.metadata == {"alias one": "other"}
    for name, one in found.items():
        assert one.dtype is tensors[name].dtype and one.shape == tensors[name].shape
        assert bits(one) == bits(tensors[name])
        outline = found.outline()[name]
        assert outline.is_meta and outline.shape == one.shape and outline.dtype is one.dtype
        assert b"".join(map(bits, found.later(name).pieces())) == bits(one), "also when it is read later"


def test_the_library_of_the_format_reads_the_same(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {name: made(dtype, (2, 3), 7) for name, dtype in DTYPES.items()}
    tensors |= {"empty": torch.zeros(0, 3), "number": torch.tensor(2.5), "turned": torch.arange(6.0).view(2, 3).mT}
    write_tensors(tmp_path / "a", tensors)
    theirs = safetensors.load_file(tmp_path / "a")
    assert theirs.keys() == tensors.keys()
    assert all(bits(theirs[name]) == bits(one) and theirs[name].shape == one.shape for name, one in tensors.items())
    safetensors.save_file({name: one.contiguous() for name, one in tensors.items()}, tmp_path / "b")
    ours = dict(TensorFile(tmp_path / "b").items())
    assert ours.keys() == tensors.keys() and all(bits(ours[name]) == bits(one) for name, one in tensors.items())


def test_a_tensor_larger_than_a_piece_is_written_whole(tmp_path: Path) -> None:
    one = torch.arange(PIECE // 4 + 3, dtype=torch.int32)
    write_tensors(tmp_path / "a", {"one": one[::2], "last": torch.tensor(5)})
    found = TensorFile(tmp_path / "a")
    assert torch.equal(found["one"], one[::2]) and int(found["last"]) == 5


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"one": torch.arange(5.0), "two": torch.tensor([True, False])})
    whole = (tmp_path / "a").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(UnreadableTensors):
            TensorFile(tmp_path / "a")


def test_a_file_that_is_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"one": torch.arange(5.0)})
    found = TensorFile(tmp_path / "a")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(UnreadableTensors, match="ends in the middle of 'one'"):
        found["one"]


def test_a_header_says_nothing_that_is_not_there(tmp_path: Path) -> None:
    """Whatever stands in it: it is refused, or every tensor that it names is read from inside of the file."""
    write_tensors(tmp_path / "a", {"one": torch.arange(6.0).view(2, 3), "two": torch.arange(3)}, {"format": "pt"})
    whole = (tmp_path / "a").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    rest = whole[8 + length :]
    for one in variants(json.loads(whole[8 : 8 + length]), 4):
        text = json.dumps(one).encode()
        (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text + rest)
        try:
            found = TensorFile(tmp_path / "a")
        except UnreadableTensors:
            continue
        assert all(tensor.nbytes <= len(rest) for _, tensor in found.items())


def test_a_dtype_that_the_format_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"'odd' is of torch\.complex128"):
        write_tensors(tmp_path / "a", {"odd": torch.zeros(2, dtype=torch.complex128)})
