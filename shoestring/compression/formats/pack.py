"""A compressed model as a folder: its tensors, a sealed manifest, and beside them a report. It is there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.kinds import KINDS
from shoestring.compression.formats.manifest import (
    FORMAT,
    MANIFEST,
    TENSORS,
    VERSION,
    Stored,
    manifest,
    parts_of,
    stored_in,
)
from shoestring.compression.formats.place import decoded, placed
from shoestring.core.errors import Mistake
from shoestring.core.files import draft_file, remove, sync
from shoestring.core.regular import read_regular
from shoestring.core.seal import Damaged, unsealed
from shoestring.core.units import bytes_text
from shoestring.measure.process import memory_all
from shoestring.processes.named_job import Claim
from shoestring.runs.tensors import NAMES, TensorFile, UnreadableTensors, write_tensors

PIECE = 1 << 22  # bytes that are hashed at once


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """What the model keeps beside its weights and saves, by name: the statistics of batch norms, parameters that are whole numbers. What
    can't be kept is refused."""
    saved = model.state_dict()
    if extra := [name for name in saved if name.rpartition(".")[2] == "_extra_state"]:
        raise Mistake(
            f"{extra[0].rpartition('.')[0] or 'the model'} saves state of its own (get_extra_state), which is not a tensor and "
            f"would be lost: keep it in buffers"
        )
    found = {name: value for name, value in beside(model).items() if name in saved}
    for name, value in found.items():
        if value.layout is not torch.strided or value.dtype not in NAMES:
            raise Mistake(
                f"{name} is {value.layout} of {value.dtype}, which a folder can't hold: keep it as a dense tensor of an ordinary "
                f"type, or don't save it (persistent=False)"
            )
    return found


def beside(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters that are no floating-point numbers."""
    return dict(model.named_buffers()) | {
        name: one for name, one in model.named_parameters() if not one.is_floating_point()
    }


def write_folder(
    target: Path,
    about: Mapping[str, Any],
    stored: Mapping[str, Stored],
    forms: Mapping[str, WeightFormat],
    buffers: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> int:
    """Write tensors and manifest, and other `files` beside them; gives the bytes of the two. One that is there is not overwritten."""
    check_free(target)
    tensors = {
        f"{name}:{part}": tensor for name in stored for part, tensor in forms[name].tensors().items()
    }  # in the predicted order
    tensors |= {f"{name}:buffer": value for name, value in buffers.items()}
    try:
        with draft_file(target, folder=True) as draft:
            size = write_tensors(draft / TENSORS, tensors)
            text = manifest(about, stored, buffers, file_digest(draft / TENSORS))
            (draft / MANIFEST).write_bytes(text)
            for name, content in (files or {}).items():
                (draft / name).write_bytes(content)
    except OSError:
        check_free(target)  # somebody else may have been faster
        raise
    return size + len(text)


def write_into(
    folder: Path,
    about: Mapping[str, Any],
    stored: Mapping[str, Stored],
    forms: Mapping[str, WeightFormat],
    buffers: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> int:
    """The same in the folder of a run: every file is there whole or not at all, the manifest last. Whoever opens a folder clears the
    drafts that were left there."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"model.tmp-{os.getpid()}"
    try:
        size = write_folder(draft, about, stored, forms, buffers, files)
        for name in (TENSORS, *(files or ()), MANIFEST):
            (draft / name).replace(folder / name)
    finally:
        remove(draft)
    sync(folder)
    return size


def check_free(target: Path) -> None:
    if target.exists():
        raise Mistake(f"{target} is there already: name another folder with --out, or remove it")


def file_digest(path: Path) -> str:
    from shoestring.core.regular import regular

    digest = hashlib.sha256()
    with open(path, "rb", opener=regular) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


class PackedModel:
    """A folder that was read and checked: what is in it is what was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise Mistake(f"{folder} is no folder: give one that `shoestring compress` wrote")
        self.about = self.read_manifest()
        try:
            self.file = TensorFile(folder / TENSORS)
        except (OSError, UnreadableTensors) as error:
            raise Mistake(
                f"{folder / TENSORS} can't be read ({error}): the folder is not whole; compress the model again"
            ) from error
        if file_digest(folder / TENSORS) != self.about.get("tensors"):
            raise Mistake(
                f"{folder / TENSORS} is damaged: its SHA-256 is not the one in the manifest; copy the folder again, or compress "
                f"the model again"
            )
        self.stored = {str(name): self.stored_as(str(name), entry) for name, entry in self.entries("weights").items()}
        self.check_names()
        self.check_tensors()

    def read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            about, ours = unsealed(read_regular(path))
        except FileNotFoundError as error:
            raise Mistake(f"{self.folder} has no {MANIFEST}: it is not a compressed model, or not whole") from error
        except Damaged as error:
            raise Mistake(f"{path} is damaged: {error}; copy the folder again, or compress the model again") from error
        if about.get("format") != FORMAT or not ours:
            raise Mistake(f"{path} is not the manifest of a compressed model")
        if about.get("version") != VERSION:
            raise Mistake(
                f"{path} is of version {about.get('version')}, and this shoestring reads version {VERSION}: update it"
            )
        return about

    @property
    def claim(self) -> Claim | None:
        """Which job it says that it was made by; None: it does not say."""
        named = self.about.get("job")
        if named is None:
            return None
        if (
            not isinstance(named, dict)
            or not all(isinstance(named.get(one), str) for one in ("file", "sha256"))
            or not isinstance(named.get("flags"), dict)
        ):
            raise Mistake(
                f"{self.folder / MANIFEST} says of its job what can't be ({str(named)[:80]}): compress the model again"
            )
        return Claim(self.folder, named["file"], named["sha256"], named["flags"])

    @property
    def edits(self) -> list[dict[str, Any]]:
        """How the model's structure was changed, each with its kind."""
        found = self.about.get("edits", [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise Mistake(
                f"{self.folder / MANIFEST} has edits that can't be ({str(found)[:80]}): compress the model again"
            )
        return found

    def entries(self, name: str) -> Mapping[str, Any]:
        found = self.about.get(name)
        if not isinstance(found, Mapping):
            raise Mistake(f"{self.folder / MANIFEST} has no {name}: it is not whole")
        return found

    def stored_as(self, name: str, entry: Any) -> Stored:
        """What a weight is said to be stored as; whatever can't be is refused."""
        try:
            found = stored_in(name, entry)
            found.parts()
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise Mistake(
                f"{self.folder / MANIFEST} says of {name[:80]!r} what can't be ({type(error).__name__}: {str(error)[:200]}): "
                f"compress the model again"
            ) from error
        return found

    def check_names(self) -> None:
        """Refuse a weight that is said to be two things, and weights that no memory could hold."""
        names = Counter(alias for one in self.stored.values() for alias in one.names)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise Mistake(f"{self.folder / MANIFEST} says twice how {twice!r} is stored: compress the model again")
        size = sum(prod(one.shape) * one.dtype.itemsize for one in self.stored.values())
        if size > memory_all():
            raise Mistake(
                f"{self.folder / MANIFEST} says that the weights take {bytes_text(size)} of memory, and this machine has "
                f"{bytes_text(memory_all())}"
            )

    @property
    def buffers(self) -> list[str]:
        """What is kept beside the weights, by name."""
        found = self.about.get("buffers", [])
        if (
            not isinstance(found, list)
            or not all(isinstance(one, str) for one in found)
            or len(set(found)) < len(found)
        ):
            raise Mistake(
                f"{self.folder / MANIFEST} has buffers that can't be ({str(found)[:80]}): compress the model again"
            )
        return found

    def check_tensors(self) -> None:
        wanted = {name: (part.dtype, part.shape) for name, part in parts_of(self.stored, {}).items()}
        buffers = {f"{name}:buffer" for name in self.buffers}
        there = {name: (entry.dtype, entry.shape) for name, entry in self.file.entries.items() if name not in buffers}
        if there != wanted or not buffers <= set(self.file.entries):
            name = next((one for one in (*wanted, *there, *buffers) if there.get(one) != wanted.get(one)), "a buffer")
            raise Mistake(
                f"{self.folder / MANIFEST} and {TENSORS} disagree about {name}: {wanted.get(name)} against {there.get(name)}"
            )

    def forms(self) -> dict[str, WeightFormat]:
        found = {}
        for name, one in self.stored.items():
            tensors = {part.removeprefix(f"{name}:"): self.file[part] for part in one.parts()}
            try:
                found[name] = KINDS[one.kind](one.shape, one.dtype, one.settings, tensors)
            except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
                raise Mistake(
                    f"{self.folder} holds a weight {name!r} that can't be ({error}): compress the model again"
                ) from error
        return found

    def check_shapes(self, model: nn.Module) -> None:
        """Refuse a model whose weights have other names or shapes."""
        own = dict(model.named_parameters(remove_duplicate=False))
        theirs = {alias: one for one in self.stored.values() for alias in one.names}
        floating = {name for name, value in own.items() if value.is_floating_point()}
        if floating != set(theirs):
            missing, extra = sorted(floating - set(theirs)), sorted(set(theirs) - floating)
            what = f"{missing[0]} is not in the folder" if missing else f"it has no {extra[0]}"
            raise Mistake(f"the model is not the one that was compressed: {what}")
        for name, one in theirs.items():
            if tuple(own[name].shape) != one.shape:
                raise Mistake(
                    f"the model is not the one that was compressed: {name} has the shape {list(own[name].shape)} there, "
                    f"and {list(one.shape)} in the folder"
                )

    def fill(self, model: nn.Module) -> nn.Module:
        """The model, made anew and cut as the manifest says, with what is stored in the place of its weights."""
        self.check_shapes(model)
        own = dict(model.named_parameters(remove_duplicate=False))
        forms = self.forms()
        for name, one in self.stored.items():  # a model that does not tie what was tied
            for alias in one.names:
                if own[alias] is not own[name]:
                    forms[alias] = forms[name]
        placed(model, forms)
        buffers = beside(model)
        for name in self.buffers:
            value = self.file[f"{name}:buffer"]
            if (
                name not in buffers
                or buffers[name].shape != value.shape
                or buffers[name].is_floating_point() != value.is_floating_point()
            ):
                raise Mistake(
                    f"the model is not the one that was compressed: its buffer {name} is missing or has another shape"
                )
            buffers[name].data = value
        model.eval().requires_grad_(False)
        return decoded(model) if self.about.get("decoded") else model
