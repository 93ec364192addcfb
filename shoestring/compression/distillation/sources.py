"""Where teachers come from, by what a user writes, and which weights exactly: a run that goes on is taught by the same ones.

    big.py@runs/big                       a run of `shoestring train`: its best weights if it validated, else its newest good ones
    big.py --width 64                     a job file with its flags: the model as the job makes it, with the job's `weights`
    big.py@weights.safetensors            the same with weights of a file
    big.py@small                          a folder of `shoestring compress`
    runs/digits                           a folder alone, where a built-in job made it: no other file that a folder names is run

Pinned, each is a job file with all its flags and with the weights, followed by what those are known by:
big.py@runs/big/checkpoints/best-00000040#1f3a9c20 --width=64 (the checkpoint, and the beginning of its SHA-256).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoestring.compression.distillation.method import PROJECTION, Projecting
from shoestring.compression.distillation.teachers import LoadedTeacher
from shoestring.compression.formats.manifest import MANIFEST, TENSORS
from shoestring.compression.formats.packed_folder import PackedModel
from shoestring.compression.load import load
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.jobfile import job_path, loaded_job, parsed_flags
from shoestring.processes.named_job import Claim, claim_of_run, flags_for
from shoestring.runs.checkpoints import BEST, RunCheckpoint, damage, digest, saved
from shoestring.runs.export import best_weights, checkpoint_of, named_weights
from shoestring.runs.folder import Folder
from shoestring.runs.initial_weights import valued

PINNED = re.compile(r"(?P<path>[^#]*?)(?:@(?P<weights>[^@#]+))?(?:#(?P<digest>[0-9a-f]{8}))?")


@dataclass(frozen=True)
class TeacherText:
    """What a user wrote of a teacher, in its parts."""

    path: str  # of the job file; of a folder alone, the folder
    weights: str = ""  # a safetensors file, a run, one of its checkpoints, or a compressed model
    digest: str = ""  # the beginning of a SHA-256; empty: not pinned
    flags: tuple[str, ...] = ()  # of a job file

    def __str__(self) -> str:
        name = self.path + (f"@{self.weights}" if self.weights else "") + (f"#{self.digest}" if self.digest else "")
        return shlex.join([name, *self.flags])


def read(written: str) -> TeacherText:
    """
    >>> read("big.py@a.safetensors --width 64")
    TeacherText(path='big.py', weights='a.safetensors', digest='', flags=('--width', '64'))
    """
    first, *flags = shlex.split(written) or [""]
    match = PINNED.fullmatch(first)
    if match is None or not match["path"]:
        raise Mistake(
            f"--teacher {written!r}: give a job file, perhaps with weights: the folder of a run (big.py@runs/big), or a file "
            f"(big.py@weights.safetensors)"
        )
    return TeacherText(match["path"], match["weights"] or "", match["digest"] or "", tuple(flags))


def pinned(written: str) -> str:
    """The same, with the weights that it has now and what they are known by."""
    if read(written).digest:
        return written
    found = with_job(read(written))
    file, folder = job_path(found.path), found.weights
    given = parsed_flags(file, list(found.flags))
    if is_run(folder) or is_checkpoint(folder):
        checkpoint = newest_of(Folder(Path(folder))) if is_run(folder) else checkpoint_in(found)
        weights, known_by, folder = (
            str(checkpoint.path),
            checkpoint.path / "manifest.json",
            str(checkpoint.path.parent.parent),
        )
    elif is_packed(folder):
        weights, known_by = os.path.realpath(folder), Path(manifest(folder))
    elif folder and not os.path.isfile(folder):
        raise Mistake(f"--teacher {written!r}: there is no file {folder}, and no run of shoestring")
    else:
        return str(
            TeacherText(file, os.path.realpath(folder) if folder else "", digest_of(folder or file), found.flags)
        )
    flags = flags_for(claim_of(folder), file, given)[0]
    return str(TeacherText(file, os.path.realpath(weights), digest_of(known_by), words_of(flags)))


def words_of(flags: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in flags.items() if value is not None)


def with_job(found: TeacherText) -> TeacherText:
    """A teacher with its job named: by the user, or by the folder of a built-in one."""
    if not os.path.isdir(found.path):
        return found
    if not (is_run(found.path) or is_packed(found.path)):
        raise Mistake(
            f"{found.path} is a folder and no run of shoestring: give the folder that `shoestring train` named, or a job file"
        )
    claim = claim_of(found.path)
    if not claim.built_in:
        raise Mistake(
            f"{found.path} says that {claim.job or 'a script'!r} makes its model. A job is code, and anybody can write a folder "
            f"that names one, so it is run only if you name it: give --teacher '{claim.job or 'JOB'}@{found.path}', if you trust "
            f"that file"
        )
    return replace(found, path=claim.built_in, weights=found.path)


def claim_of(folder: str) -> Claim:
    """What a folder says of its job."""
    return (
        claim_of_run(Folder(Path(folder))) if is_run(folder) else PackedModel(Path(folder)).claim or Claim(Path(folder))
    )


def is_run(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "run.json"))


def manifest(path: str) -> str:
    return os.path.join(path, MANIFEST)


def is_packed(path: str) -> bool:
    """Whether a folder is one of `shoestring compress`."""
    return os.path.isfile(manifest(path)) and os.path.isfile(os.path.join(path, TENSORS)) and not is_run(path)


def digest_of(path: str | Path) -> str:
    return digest(Path(path))[:8]


def same(found: TeacherText, path: str | Path) -> None:
    """Refuse what is not what was pinned."""
    if found.digest and digest_of(path) != found.digest:
        raise Mistake(
            f"the teacher {found.path} is not the one that this run was begun with ({path} has changed): put it back, or begin "
            f"anew with --fresh"
        )


def newest_of(folder: Folder) -> RunCheckpoint:
    """The best weights of a run, or its newest good ones."""
    return best_weights(folder) if saved(folder.checkpoints, BEST) else checkpoint_of(folder, None)


def is_checkpoint(path: str) -> bool:
    """Whether a path is that of a checkpoint in a run, which may be gone."""
    return os.path.basename(os.path.dirname(path)) == "checkpoints" and not os.path.isfile(path)


def checkpoint_in(found: TeacherText) -> RunCheckpoint:
    """The checkpoint that was pinned."""
    checkpoint = RunCheckpoint(Path(found.weights))
    if not checkpoint.path.is_dir():
        raise Mistake(
            f"the teacher's checkpoint {checkpoint.path} is not there any more: its run went on and kept newer ones, or somebody "
            f"removed it; begin anew with --fresh, or put it back"
        )
    if reason := damage(checkpoint, ("parts",)):
        raise Mistake(f"the teacher's checkpoint {checkpoint.path} is damaged ({reason}): name another teacher")
    same(found, checkpoint.path / "manifest.json")
    return checkpoint


def opener(written: str) -> Callable[[], LoadedTeacher]:
    """What opens a teacher."""

    def opened() -> LoadedTeacher:
        found = read(pinned(written))
        file = job_path(found.path)
        job = loaded_job(file, parsed_flags(file, list(found.flags)))
        if is_checkpoint(found.weights):
            return LoadedTeacher(with_weights(job, checkpoint_in(found)), job.forward, found.weights)
        if is_packed(found.weights):
            same(found, manifest(found.weights))
            return LoadedTeacher(load(found.weights, model=job.model), job.forward, found.weights)
        same(found, found.weights or file)
        job = replace(job, weights=found.weights) if found.weights else job
        return LoadedTeacher(valued(job.model(), job), job.forward, found.path)

    return opened


def with_weights(job: Job, checkpoint: RunCheckpoint) -> nn.Module:
    """The job's model with the weights of a checkpoint."""
    make = (
        job.model.plain if isinstance(job.model, Projecting) else job.model
    )  # a distilled run does not need its own teacher any more
    model = valued(make(), replace(job, weights=""))
    state = {
        name: torch.cat([piece.reshape(-1) for piece in one.pieces()]).view(one.shape)
        for name, one in named_weights(checkpoint, list(model.state_dict())).items()
        if not name.startswith(PROJECTION)
    }
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise Mistake(
            f"the weights of {checkpoint.path} do not fit the model of its job: {str(error).splitlines()[-1].strip()} "
            f"Give the job, and the flags, that it was trained with: --teacher 'big.py@runs/big --width 64'"
        ) from error
    return model


def taken_from(written: str) -> str:
    """The safetensors file with all weights of a teacher, for a student that begins from some of them."""
    found = read(pinned(written))
    if not is_checkpoint(found.weights):
        if not found.weights or is_packed(found.weights):
            raise Mistake(
                f"--layers takes weights of the teacher, and {written} is not a run and names no weights: give "
                f"{found.path}@runs/big, or {found.path}@weights.safetensors"
            )
        return found.weights
    checkpoint = checkpoint_in(found)
    file = checkpoint.path / "weights.safetensors"
    if (
        checkpoint.averages()
        or set(checkpoint.all_weights()) != set(checkpoint.weights())
        or "low rank" in checkpoint.outline()["parts"]
    ):
        raise Mistake(
            f"--layers takes weights of the teacher from {file}, and its run keeps some of them elsewhere: export them "
            f"(shoestring export {checkpoint.path.parent.parent} --to safetensors --out big.safetensors) and give --teacher "
            f"big.py@big.safetensors"
        )
    return str(file)
