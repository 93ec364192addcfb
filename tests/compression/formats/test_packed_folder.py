"""A folder that is not what was written is refused, whatever is wrong with it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring.compression.formats.packed_folder import PackedModel
from shoestring.compression.formats.packed_modules import decode_weights, formats_of, memory_of
from shoestring.core.errors import Mistake
from shoestring.core.files.regular import file_sha256
from shoestring.core.files.seal import seal, unseal
from tests.compression.models import Tied, job_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "small"
    shoestring.compress(job_of("tied embeddings"), folder, use=["Quantize(bits=4)", "Half()"], samples=16)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "small")
    return tmp_path / "small"


def loaded(folder: Path) -> nn.Module:
    return shoestring.load(folder, model=Tied)


def test_it_loads_and_is_an_ordinary_module(folder: Path) -> None:
    model, words = loaded(folder), torch.randint(0, 40, (2, 5))
    answer = model(words)
    assert isinstance(model.head, nn.Linear) and not list(model.parameters()) and not model.training
    assert model.head.weight_form is model.table.weight_form, "what is tied is stored once"
    assert torch.equal(deepcopy(model)(words), answer) and torch.equal(pickle.loads(pickle.dumps(model))(words), answer)
    assert torch.equal(shoestring.load(folder, model=Tied, decoded=True)(words), answer)
    assert memory_of(model) < memory_of(Tied()) / 3, "weights stay packed in memory"
    again = loaded(folder)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(words), answer)
    assert (
        torch.equal(decode_weights(model)(words), answer)
        and model.head.weight is model.table.weight
        and not formats_of(model)
    )


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_one_flipped_bit_anywhere_is_seen(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        (folder / name).write_bytes(changed)
        with pytest.raises(Mistake):
            loaded(folder)
    (folder / name).write_bytes(whole)
    loaded(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_file_that_is_missing_cut_or_no_file_is_refused(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-5])
    with pytest.raises(Mistake):
        loaded(folder)
    (folder / name).unlink()
    with pytest.raises(Mistake, match="incomplete"):
        loaded(folder)
    os.mkfifo(folder / name)
    with pytest.raises((Mistake, OSError), match="pipe"):
        loaded(folder)
    with pytest.raises(Mistake, match="is not a folder"):
        loaded(folder / name)


def lie(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change a manifest and seal it again: only its contents are wrong."""

    def done(folder: Path) -> None:
        about, _ = unseal((folder / "manifest.json").read_bytes())
        change(about)
        (folder / "manifest.json").write_bytes(seal(about))

    return done


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another shape": lambda about: about["weights"]["work.weight"].update(shape=[16, 8]),
    "a huge shape": lambda about: about["weights"]["work.weight"].update(shape=[10**9, 10**9]),
    "a negative shape": lambda about: about["weights"]["work.weight"].update(shape=[-16, -16]),
    "no shape": lambda about: about["weights"]["work.weight"].update(shape="x"),
    "another kind": lambda about: about["weights"]["work.weight"].update(kind="plain"),
    "no such kind": lambda about: about["weights"]["work.weight"].update(kind="os.system"),
    "other bits": lambda about: about["weights"]["work.weight"]["settings"].update(bits=3),
    "no bits": lambda about: about["weights"]["work.weight"]["settings"].update(bits="many"),
    "a weight less": lambda about: about["weights"].pop("work.weight"),
    "a name that is not there": lambda about: about["weights"].update(ghost=about["weights"]["work.weight"]),
    "no weights": lambda about: about.pop("weights"),
    "weights as a list": lambda about: about.update(weights=[1]),
    "an edit nobody knows": lambda about: about.update(edits=[{"kind": "ghost"}]),
    "another format": lambda about: about.update(format="zip"),
    "a later version": lambda about: about.update(version=99),
    "another digest": lambda about: about.update(tensors="0" * 64),
    "a buffer that is not there": lambda about: about.update(buffers=["ghost"]),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies_is_refused(folder: Path, name: str) -> None:
    lie(LIES[name])(folder)
    with pytest.raises(Mistake):
        loaded(folder)


def test_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(Mistake, match="not the model that was compressed"):
        shoestring.load(folder, model=lambda: nn.Linear(2, 2))
    with pytest.raises(Mistake, match="does not say how to build its model"):
        shoestring.load(folder)
    with pytest.raises(Mistake, match="not a module"):
        shoestring.load(folder, model=lambda: 3)  # type: ignore[arg-type, return-value]


def test_a_folder_that_is_there_is_not_overwritten(made: Path) -> None:
    before = sorted((one.name, one.stat().st_size) for one in made.iterdir())
    with pytest.raises(Mistake, match="is asked for now: use= changed"):
        shoestring.compress(job_of("tied embeddings"), made, use=["Half()"], samples=16)
    assert sorted((one.name, one.stat().st_size) for one in made.iterdir()) == before


def test_a_run_is_no_compressed_model_and_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(Mistake, match="is a run, and this reads what `shoestring compress` wrote"):
        shoestring.load(tmp_path)


def test_the_job_file_may_move_and_is_only_run_where_the_user_says_so(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("from tests.compression.models import job_of\n\ndef job() -> object:\n    return job_of('mlp')\n")
    shoestring.compress(file, tmp_path / "small", use=["Half()"], samples=16)
    x = torch.randn(2, 16)
    answer = shoestring.load(tmp_path / "small", job=file)(x)
    with pytest.raises(Mistake, match=f"so it is run only if you name it: add job='{file}'"):
        shoestring.load(tmp_path / "small")
    module = Path(__file__).parents[1] / "models.py"
    claim = PackedModel(tmp_path / "small").claim
    assert claim is not None and claim.modules["tests/compression/models.py"] == file_sha256(module)
    file.rename(tmp_path / "moved.py")
    assert torch.equal(shoestring.load(tmp_path / "small", job=tmp_path / "moved.py")(x), answer)
    assert torch.equal(shoestring.load(tmp_path / "small", job=tmp_path / "small" / "job.py")(x), answer)
    assert torch.equal(shoestring.load(tmp_path / "small", job=lambda: job_of("mlp"))(x), answer)
    file.write_text((tmp_path / "moved.py").read_text() + "# changed\n")
    with pytest.warns(UserWarning, match="is not as it was"):
        shoestring.load(tmp_path / "small", job=file)
    assert json.loads((tmp_path / "small" / "manifest.json").read_text())["job"]["file"] == str(file)
