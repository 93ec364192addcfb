"""Write and read the folder of a compressed model: tensors, a sealed manifest and a report. Writing is atomic."""

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
    read_entry,
    tensor_layout,
)
from shoestring.compression.formats.packed_modules import decode_weights, place_formats
from shoestring.core.errors import Mistake
from shoestring.core.files.files import draft_file, remove, sync
from shoestring.core.files.regular import read_regular
from shoestring.core.files.seal import Damaged, unseal
from shoestring.core.units import bytes_text
from shoestring.measure.process import memory_all
from shoestring.processes.named_job import Claim
from shoestring.runs.weights.tensors import NAMES, TensorFile, UnreadableTensors, write_tensors

PIECE = 1 << 22  # bytes hashed at once


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's saved state other than weights, by name: batch norm statistics, integer parameters. Raises Mistake
    for state that the folder can't hold."""
    saved = model.state_dict()
    if extra := [name for name in saved if name.rpartition(".")[2] == "_extra_state"]:
        raise Mistake(
            f"{extra[0].rpartition('.')[0] or 'the model'} saves extra state (get_extra_state), which is not a tensor and "
            f"would be lost: keep it in buffers"
        )
    found = {name: value for name, value in buffers_and_integers(model).items() if name in saved}
    for name, value in found.items():
        if value.layout is not torch.strided or value.dtype not in NAMES:
            raise Mistake(
                f"{name} is a {value.layout} tensor of {value.dtype}, which a compressed folder can't hold: make it a dense "
                f"tensor of an ordinary dtype, or don't save it (persistent=False)"
            )
    return found


def buffers_and_integers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters that are not floating point."""
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
    """Write tensors, manifest and other `files`; returns the bytes of tensors and manifest. An existing folder is never
    overwritten."""
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
        check_free(target)  # another process may have created it meanwhile
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
    """The same inside the folder of a run: every file appears complete or not at all, the manifest last. Opening the
    folder removes drafts left behind."""
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
    from shoestring.core.files.regular import regular

    digest = hashlib.sha256()
    with open(path, "rb", opener=regular) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


class PackedModel:
    """The folder of a compressed model, read and verified against its manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise Mistake(f"{folder} is not a folder: give one that `shoestring compress` wrote")
        self.about = self.read_manifest()
        try:
            self.file = TensorFile(folder / TENSORS)
        except (OSError, UnreadableTensors) as error:
            raise Mistake(
                f"{folder / TENSORS} can't be read ({error}): the folder is incomplete; compress the model again"
            ) from error
        if file_digest(folder / TENSORS) != self.about.get("tensors"):
            raise Mistake(
                f"{folder / TENSORS} is damaged: its SHA-256 is not the one in the manifest; copy the folder again, or compress "
                f"the model again"
            )
        self.stored = {
            str(name): self.read_weight_entry(str(name), entry) for name, entry in self.entries("weights").items()
        }
        self.check_names()
        self.check_tensors()

    def read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            about, ours = unseal(read_regular(path))
        except FileNotFoundError as error:
            if (self.folder / "checkpoints").exists():
                raise Mistake(
                    f"{self.folder} is a run, and this reads what `shoestring compress` wrote: compress the run, or write "
                    f"its weights with shoestring export {self.folder} --to safetensors"
                ) from error
            raise Mistake(f"{self.folder} has no {MANIFEST}: it is not a compressed model, or incomplete") from error
        except Damaged as error:
            raise Mistake(f"{path} is damaged: {error}; copy the folder again, or compress the model again") from error
        if about.get("format") != FORMAT or not ours:
            raise Mistake(f"{path} is not the manifest of a compressed model")
        if about.get("version") != VERSION:
            raise Mistake(
                f"{path} has version {about.get('version')}, but this shoestring reads version {VERSION}: update shoestring"
            )
        return about

    @property
    def claim(self) -> Claim | None:
        """The job that it claims to come from; None: it names none."""
        named = self.about.get("job")
        if named is None:
            return None
        if (
            not isinstance(named, dict)
            or not all(isinstance(named.get(one), str) for one in ("file", "sha256"))
            or not isinstance(named.get("flags"), dict)
            or not isinstance(named.get("modules", {}), dict)
        ):
            raise Mistake(
                f"{self.folder / MANIFEST} has an invalid job entry ({str(named)[:80]}): compress the model again"
            )
        modules = {name: str(digest) for name, digest in named.get("modules", {}).items()}
        return Claim(self.folder, named["file"], named["sha256"], named["flags"], modules)

    @property
    def edits(self) -> list[dict[str, Any]]:
        """Changes to the model's structure, each with its kind."""
        found = self.about.get("edits", [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise Mistake(f"{self.folder / MANIFEST} has invalid edits ({str(found)[:80]}): compress the model again")
        return found

    def entries(self, name: str) -> Mapping[str, Any]:
        found = self.about.get(name)
        if not isinstance(found, Mapping):
            raise Mistake(f"{self.folder / MANIFEST} has no {name}: it is incomplete")
        return found

    def read_weight_entry(self, name: str, entry: Any) -> Stored:
        """Parse the manifest's entry of one weight. Raises Mistake if it is invalid."""
        try:
            found = read_entry(name, entry)
            found.parts()
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise Mistake(
                f"{self.folder / MANIFEST} has an invalid entry for {name[:80]!r} ({type(error).__name__}: "
                f"{str(error)[:200]}): compress the model again"
            ) from error
        return found

    def check_names(self) -> None:
        """Refuse a weight with two entries, and weights larger than this machine's memory."""
        names = Counter(alias for one in self.stored.values() for alias in one.names)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise Mistake(f"{self.folder / MANIFEST} has two entries for {twice!r}: compress the model again")
        size = sum(prod(one.shape) * one.dtype.itemsize for one in self.stored.values())
        if size > memory_all():
            raise Mistake(
                f"the weights in {self.folder / MANIFEST} take {bytes_text(size)} of memory, and this machine has "
                f"{bytes_text(memory_all())}"
            )

    @property
    def buffers(self) -> list[str]:
        """Names of the saved tensors that are not weights."""
        found = self.about.get("buffers", [])
        if (
            not isinstance(found, list)
            or not all(isinstance(one, str) for one in found)
            or len(set(found)) < len(found)
        ):
            raise Mistake(f"{self.folder / MANIFEST} has invalid buffers ({str(found)[:80]}): compress the model again")
        return found

    def check_tensors(self) -> None:
        wanted = {name: (part.dtype, part.shape) for name, part in tensor_layout(self.stored, {}).items()}
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
                    f"{self.folder} has an invalid weight {name!r} ({error}): compress the model again"
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
            raise Mistake(f"this is not the model that was compressed: {what}")
        for name, one in theirs.items():
            if tuple(own[name].shape) != one.shape:
                raise Mistake(
                    f"this is not the model that was compressed: {name} has the shape {list(own[name].shape)} in the model "
                    f"and {list(one.shape)} in the folder"
                )

    def fill(self, model: nn.Module) -> nn.Module:
        """Put the packed weights and buffers into a freshly built model, to which the manifest's edits were applied."""
        self.check_shapes(model)
        own = dict(model.named_parameters(remove_duplicate=False))
        forms = self.forms()
        for name, one in self.stored.items():  # the new model may not tie weights that were tied
            for alias in one.names:
                if own[alias] is not own[name]:
                    forms[alias] = forms[name]
        place_formats(model, forms)
        buffers = buffers_and_integers(model)
        for name in self.buffers:
            value = self.file[f"{name}:buffer"]
            if (
                name not in buffers
                or buffers[name].shape != value.shape
                or buffers[name].is_floating_point() != value.is_floating_point()
            ):
                raise Mistake(
                    f"this is not the model that was compressed: its buffer {name} is missing or has another shape"
                )
            buffers[name].data = value
        model.eval().requires_grad_(False)
        return decode_weights(model) if self.about.get("decoded") else model
