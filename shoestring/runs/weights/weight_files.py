"""Find the tensors of one or more safetensors files from the paths that people give: a file, several, an index, a
folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import read_regular, regular
from shoestring.core.files.untrusted_json import parse_json
from shoestring.core.model.weights import PICKLES
from shoestring.runs.weights.tensors import TensorFile, UnreadableTensors

PICKLED = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # first bytes of such files
INDEX = ".safetensors.index.json"


def open_tensors(paths: Iterable[str]) -> dict[str, TensorFile]:
    """All tensors by name, with the file that each is in."""
    found: dict[str, TensorFile] = {}
    for path in (file for one in paths for file in files_of(Path(one))):
        for name in (file := read(path)):
            if name in found:
                raise Mistake(f"the job's weights: {name} is in {found[name].path} and in {path}; give one of them")
            found[name] = file
    return found


def read(path: Path) -> TensorFile:
    refuse_pickle(path)
    try:
        return TensorFile(path)
    except (OSError, UnreadableTensors) as error:
        raise Mistake(f"the job's weights {path} can't be read: {error}") from error


def files_of(path: Path) -> list[Path]:
    """The safetensors files that a path refers to."""
    if path.name.endswith(INDEX):
        return shards(path)
    if not path.is_dir():
        return [path]
    indexes = sorted(path.glob(f"*{INDEX}"))
    if indexes:
        return shards(path / f"model{INDEX}" if path / f"model{INDEX}" in indexes else indexes[0])
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        for other in sorted(path.iterdir()):
            refuse_pickle(other)
        raise Mistake(f"the job's weights {path} is a folder without a safetensors file")
    return found


def shards(index: Path) -> list[Path]:
    """The files that an index names; refused if one lacks a tensor that the index says it has."""
    try:
        places = {name: str(file) for name, file in parse_json(read_regular(index))["weight_map"].items()}
        names = list(dict.fromkeys(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Mistake(
            f"the job's weights: {index} is not an index of safetensors files ({type(error).__name__}: {error})"
        ) from error
    for name in names:
        if Path(name).name != name or not os.path.isfile(index.parent / name):  # no such name can raise
            raise Mistake(
                f"the job's weights: {index.name} names {name}, which is not beside it in {index.parent}: a part of the model is "
                f"missing"
            )
    entries = {name: read(index.parent / name).entries for name in names}
    lost = next((one for one, name in places.items() if one not in entries[name]), None)
    if lost is not None:
        raise Mistake(f"the job's weights: {index.name} says that {lost} is in {places[lost]}, and it is not there")
    return [index.parent / name for name in names]


def refuse_pickle(path: Path) -> None:
    """Refuse a file whose reading could run code."""
    try:
        with open(path, "rb", opener=regular) as file:
            first = file.read(4)
    except OSError:
        first = b""
    if path.suffix in PICKLES or first.startswith(PICKLED):
        out = path.with_suffix(".safetensors")
        raise Mistake(
            f'{path} is a pickle, which can run code when it is read, so it is not. Convert it once: python -c "import torch; from '
            f"safetensors.torch import save_file; save_file({{name: value.clone().contiguous() for name, value in torch.load('{path}', "
            f"weights_only=True).items()}}, '{out}')\" and give {out}"
        )
