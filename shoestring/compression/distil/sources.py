"""Where teachers come from, by what a user writes, and which weights exactly: a run that goes on is taught by the same ones.

    runs/big                              a run of `shoestring train`: its best weights if it validated, else its newest good ones
    big.py --width 64                     a job file with its flags: the model as the job makes it, with the job's `weights`
    big.py@weights.safetensors            the same with weights of a file
    a folder of `shoestring compress`     the compressed model, called as the student is

Pinned, each is followed by what it is known by: runs/big@best-00000040#1f3a9c20 (the checkpoint, and the beginning of its SHA-256).
"""
from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.compression.distil.method import PROJECTION, Projecting
from shoestring.compression.distil.teachers import Opened
from shoestring.compression.load import load
from shoestring.compression.manifest import MANIFEST, TENSORS
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, default_forward
from shoestring.jobfile import job_path, loaded_job, parsed_flags
from shoestring.runs.checkpoints import BEST, Checkpoint, damage, digest, saved
from shoestring.runs.export import best_weights, checkpoint_of, named_weights
from shoestring.runs.folder import Folder, source_of
from shoestring.runs.initial_weights import valued

PINNED = re.compile(r"(?P<path>[^#]*?)(?:@(?P<weights>[^@#]+))?(?:#(?P<digest>[0-9a-f]{8}))?")


@dataclass(frozen=True)
class Written:
    """What a user wrote of a teacher, in its parts."""

    path: str
    weights: str = ""              # of a run: the checkpoint's name; of a job file: a safetensors file
    digest: str = ""               # the beginning of a SHA-256; empty: not pinned
    flags: tuple[str, ...] = ()    # of a job file

    def __str__(self) -> str:
        name = self.path + (f"@{self.weights}" if self.weights else "") + (f"#{self.digest}" if self.digest else "")
        return shlex.join([name, *self.flags])


def read(written: str) -> Written:
    """
    >>> read("big.py@a.safetensors --width 64")
    Written(path='big.py', weights='a.safetensors', digest='', flags=('--width', '64'))
    """
    first, *flags = shlex.split(written) or [""]
    match = PINNED.fullmatch(first)
    if match is None or not match["path"]:
        raise Mistake(f"--teacher {written!r}: give the folder of a run, or a job file, perhaps with weights (big.py@weights.safetensors)")
    return Written(match["path"], match["weights"] or "", match["digest"] or "", tuple(flags))


def pinned(written: str) -> str:
    """The same, with the weights that it has now and what they are known by."""
    found = read(written)
    if is_run(found.path):
        if found.flags:
            raise Mistake(f"--teacher {written!r}: a run was begun with its own flags; give it without {found.flags[0]}")
        checkpoint = checkpoint_in(found)
        return str(Written(os.path.realpath(found.path), checkpoint.path.name, digest_of(checkpoint.path / "manifest.json")))
    if is_packed(found.path):
        return str(replace(found, path=os.path.realpath(found.path), digest=digest_of(manifest(found.path))))
    if os.path.isdir(found.path):
        raise Mistake(f"{found.path} is a folder and no run of shoestring: give the folder that `shoestring train` named, or a job file")
    file = job_path(found.path)
    parsed_flags(file, list(found.flags))
    if found.weights and not os.path.isfile(found.weights):
        raise Mistake(f"--teacher {written!r}: there is no file {found.weights}")
    weights = os.path.realpath(found.weights) if found.weights else ""
    return str(Written(file, weights, digest_of(weights or file), found.flags))


def is_run(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "run.json"))


def manifest(path: str) -> str:
    return os.path.join(path, MANIFEST)


def is_packed(path: str) -> bool:
    """Whether a folder is one of `shoestring compress`."""
    return os.path.isfile(manifest(path)) and os.path.isfile(os.path.join(path, TENSORS)) and not is_run(path)


def digest_of(path: str | Path) -> str:
    return digest(Path(path))[:8]


def same(found: Written, path: str | Path) -> None:
    """Refuse what is not what was pinned."""
    if found.digest and digest_of(path) != found.digest:
        raise Mistake(f"the teacher {found.path} is not the one that this run was begun with ({path} has changed): put it back, or begin "
                      f"anew with --fresh")


def checkpoint_in(found: Written) -> Checkpoint:
    """The checkpoint of a run that was pinned; else its best weights, or its newest good ones."""
    folder = Folder(Path(found.path))
    if not found.weights:
        return best_weights(folder) if saved(folder.checkpoints, BEST) else checkpoint_of(folder, None)
    checkpoint = Checkpoint(folder.checkpoints / found.weights)
    if not checkpoint.path.is_dir():
        raise Mistake(f"the teacher's checkpoint {checkpoint.path} is not there any more: its run went on and kept newer ones, or somebody "
                      f"removed it; begin anew with --fresh, or put it back")
    if reason := damage(checkpoint, ("parts",)):
        raise Mistake(f"the teacher's checkpoint {checkpoint.path} is damaged ({reason}): name another teacher")
    same(found, checkpoint.path / "manifest.json")
    return checkpoint


def opener(written: str, forward: Callable[[nn.Module, Batch], Any] = default_forward) -> Callable[[], Opened]:
    """What opens a teacher; `forward`: how a model that has no job of its own is called."""
    def opened() -> Opened:
        found = read(written)
        if is_run(found.path):
            return of_run(found)
        if is_packed(found.path):
            same(found, manifest(found.path))
            return Opened(load(found.path), forward, found.path)
        return of_file(found)

    return opened


def of_run(found: Written) -> Opened:
    folder = Folder(Path(found.path))
    request, checkpoint = folder.request(), checkpoint_in(found)
    assert request is not None, "a run has a request"
    job = loaded_job(source_of(folder), dict(request.flags))
    return Opened(with_weights(job, checkpoint), job.forward, found.path)


def with_weights(job: Job, checkpoint: Checkpoint) -> nn.Module:
    """The job's model with the weights of a checkpoint."""
    make = job.model.plain if isinstance(job.model, Projecting) else job.model   # a distilled run does not need its own teacher any more
    model = valued(make(), replace(job, weights=""))
    state = {name: torch.cat([piece.reshape(-1) for piece in one.pieces()]).view(one.shape)
             for name, one in named_weights(checkpoint, list(model.state_dict())).items() if not name.startswith(PROJECTION)}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise Mistake(f"the weights of {checkpoint.path} do not fit the model of its job: {str(error).splitlines()[-1].strip()}") from error
    return model


def of_file(found: Written) -> Opened:
    file = job_path(found.path)
    same(found, found.weights or file)
    job = loaded_job(file, parsed_flags(file, list(found.flags)))
    job = replace(job, weights=found.weights) if found.weights else job
    return Opened(valued(job.model(), job), job.forward, found.path)


def taken_from(written: str) -> str:
    """The safetensors file with all weights of a teacher, for a student that begins from some of them."""
    found = read(written)
    if not is_run(found.path):
        if not found.weights:
            raise Mistake(f"--layers takes weights of the teacher, and {found.path} is not a run and names no weights: give a run, or "
                          f"{found.path}@weights.safetensors")
        return found.weights
    checkpoint = checkpoint_in(found)
    file = checkpoint.path / "weights.safetensors"
    if checkpoint.averages() or set(checkpoint.all_weights()) != set(checkpoint.weights()) or "low rank" in checkpoint.outline()["parts"]:
        raise Mistake(f"--layers takes weights of the teacher from {file}, and its run keeps some of them elsewhere: export them "
                      f"(shoestring export {found.path} --to safetensors --out big.safetensors) and give --teacher big.py@big.safetensors")
    return str(file)
