"""The syntax of --teacher, and how it is pinned to exact weights, so that a resumed run has the same teacher.

    big.py@runs/big                a run of `shoestring train`: its best weights if it validated, else its newest good ones
    big.py --width 64              a job file with its flags: the model as the job builds it, with the job's `weights`
    big.py@weights.safetensors     the same with weights from a file
    big.py@small                   a folder of `shoestring compress`
    runs/digits                    a folder alone, if it belongs to a built-in job: other files named by a folder are not run

A pinned teacher is a job file with all its flags, its weights, and the beginning of their SHA-256:
big.py@runs/big/checkpoints/best-00000040#1f3a9c20 --width=64.
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

from shoestring.compression.distillation.method import PROJECTION, ProjectedStudent
from shoestring.compression.distillation.teachers import LoadedTeacher
from shoestring.compression.formats.manifest import MANIFEST, TENSORS
from shoestring.compression.formats.packed_folder import PackedModel
from shoestring.compression.loading.load import load
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.jobfile import BUILT_IN, job_path, load_job, parse_flags
from shoestring.processes.named_job import Claim, claim_of_run, flags_for
from shoestring.runs.checkpoints.checkpoints import BEST, RunCheckpoint, damage, digest, list_checkpoints
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import best_weights, checkpoint_of, named_weights
from shoestring.runs.weights.initial_weights import fill_weights

PINNED = re.compile(r"(?P<path>[^#]*?)(?:@(?P<weights>[^@#]+))?(?:#(?P<digest>[0-9a-f]{8}))?")


@dataclass(frozen=True)
class TeacherText:
    """A parsed --teacher argument."""

    path: str  # job file, or a folder alone
    weights: str = ""  # a safetensors file, a run, one of its checkpoints, or a compressed model
    digest: str = ""  # beginning of the SHA-256; empty: not pinned
    flags: tuple[str, ...] = ()  # of the job file

    def __str__(self) -> str:
        name = self.path + (f"@{self.weights}" if self.weights else "") + (f"#{self.digest}" if self.digest else "")
        return shlex.join([name, *self.flags])


def parse_teacher(written: str) -> TeacherText:
    """Parse a --teacher argument.

    >>> parse_teacher("big.py@a.safetensors --width 64")
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


def pin_teacher(written: str) -> str:
    """Pin a --teacher argument: name its current weights with their digest."""
    if parse_teacher(written).digest:
        return written
    found = name_job(parse_teacher(written))
    file, folder = job_path(found.path), found.weights
    given = parse_flags(file, list(found.flags))
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
    return str(TeacherText(file, os.path.realpath(weights), digest_of(known_by), flag_words(flags)))


def flag_words(flags: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"--{name}={value}" for name, value in flags.items() if value is not None)


def name_job(found: TeacherText) -> TeacherText:
    """Add the job: it was named by the user, or a folder names a built-in one."""
    if not os.path.isdir(found.path):
        return found
    if not (is_run(found.path) or is_packed(found.path)):
        raise Mistake(
            f"{found.path} is a folder, but no run of shoestring: give a folder written by `shoestring train`, or a job file"
        )
    claim = claim_of(found.path)
    if not claim.built_in:
        raise Mistake(
            f"{found.path} says that {claim.job or 'a script'!r} builds its model. A job is code, and anybody can write a folder "
            f"that names one, so it is run only if you name it: give --teacher '{claim.job or 'JOB'}@{found.path}', if you trust "
            f"that file"
        )
    return replace(found, path=claim.built_in, weights=found.path)


def claim_of(folder: str) -> Claim:
    """The job that a folder names."""
    return (
        claim_of_run(Folder(Path(folder))) if is_run(folder) else PackedModel(Path(folder)).claim or Claim(Path(folder))
    )


def is_run(path: str) -> bool:
    """Whether a folder is that of a run that has trained weights."""
    return os.path.isfile(os.path.join(path, "run.json")) and not os.path.isfile(manifest(path))


def manifest(path: str) -> str:
    return os.path.join(path, MANIFEST)


def is_packed(path: str) -> bool:
    """Whether a folder is one of `shoestring compress`."""
    return os.path.isfile(manifest(path)) and os.path.isfile(os.path.join(path, TENSORS))


def digest_of(path: str | Path) -> str:
    return digest(Path(path))[:8]


def pin_file(value: str) -> str:
    """A file, or the name of a built-in job, with its digest; other values unchanged."""
    path = job_path(value) if value in BUILT_IN else os.path.realpath(value)
    return f"{path}#{digest_of(path)}" if os.path.isfile(path) else value


def check_digest(found: TeacherText, path: str | Path) -> None:
    """Refuse a file whose digest differs from the pinned one."""
    if found.digest and digest_of(path) != found.digest:
        raise Mistake(
            f"the teacher {found.path} is not the one with which this run was started ({path} has changed): put it back, or "
            f"start again with --fresh"
        )


def newest_of(folder: Folder) -> RunCheckpoint:
    """The checkpoint of a run with the best weights, or the newest good one."""
    return best_weights(folder) if list_checkpoints(folder.checkpoints, BEST) else checkpoint_of(folder, None)


def is_checkpoint(path: str) -> bool:
    """Whether a path names a checkpoint of a run; it need not exist any more."""
    return os.path.basename(os.path.dirname(path)) == "checkpoints" and not os.path.isfile(path)


def checkpoint_in(found: TeacherText) -> RunCheckpoint:
    """The pinned checkpoint."""
    checkpoint = RunCheckpoint(Path(found.weights))
    if not checkpoint.path.is_dir():
        raise Mistake(
            f"the teacher's checkpoint {checkpoint.path} does not exist any more: its run has replaced it by newer ones, or it "
            f"was removed; start again with --fresh, or put it back"
        )
    if reason := damage(checkpoint, ("parts",)):
        raise Mistake(f"the teacher's checkpoint {checkpoint.path} is damaged ({reason}): name another teacher")
    check_digest(found, checkpoint.path / "manifest.json")
    return checkpoint


def teacher_opener(written: str) -> Callable[[], LoadedTeacher]:
    """A function that loads the teacher."""

    def load_teacher() -> LoadedTeacher:
        found = parse_teacher(pin_teacher(written))
        file = job_path(found.path)
        job = load_job(file, parse_flags(file, list(found.flags)))
        if is_checkpoint(found.weights):
            return LoadedTeacher(model_with_checkpoint(job, checkpoint_in(found)), job.forward, found.weights)
        if is_packed(found.weights):
            check_digest(found, manifest(found.weights))
            return LoadedTeacher(load(found.weights, model=job.model), job.forward, found.weights)
        check_digest(found, found.weights or file)
        job = replace(job, weights=found.weights) if found.weights else job
        return LoadedTeacher(fill_weights(job.model(), job), job.forward, found.path)

    return load_teacher


def model_with_checkpoint(job: Job, checkpoint: RunCheckpoint) -> nn.Module:
    """The job's model with the weights of a checkpoint."""
    make = (
        job.model.plain if isinstance(job.model, ProjectedStudent) else job.model
    )  # a distilled run does not need its own teacher any more
    model = fill_weights(make(), replace(job, weights=""))
    state = {
        name: torch.cat([piece.reshape(-1) for piece in one.pieces()]).view(one.shape)
        for name, one in named_weights(checkpoint).items()
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


def teacher_weights_file(written: str) -> str:
    """The safetensors file with all weights of a teacher, to initialise a student with fewer layers."""
    found = parse_teacher(pin_teacher(written))
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
