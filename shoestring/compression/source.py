"""What is to be compressed: the trained model of a run, or of a job, and batches to look at it with."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.formats.manifest import MANIFEST
from shoestring.compression.weight_source import check_weights, is_weights
from shoestring.core.batch import Batch, mapped, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.regular import regular
from shoestring.core.weights import PICKLES, as_weights
from shoestring.data.feed import looking
from shoestring.jobfile import BUILT_IN, job_path, loaded_job
from shoestring.processes.named_job import Claim, Named, claim_of_run, named_job
from shoestring.runs.checkpoints import RunCheckpoint
from shoestring.runs.export import best_weights, checkpoint_of, named_weights, newer_weights
from shoestring.runs.folder import Folder
from shoestring.runs.initial_weights import fresh_model
from shoestring.runs.initial_weights import source as weights_taken
from shoestring.runs.modules import changed_text, changes, imported_modules, kept_modules

CALIBRATION = 256  # samples that are looked at
CHECKED = 192  # that plans are confirmed with,
UNSEEN = 1024  # and that only the report is measured on


@dataclass(frozen=True)
class ModelSource:
    """A trained model with its job."""

    job: Job
    model: nn.Module
    about: Mapping[str, Any]  # how the model is made again, for the manifest
    notes: tuple[str, ...]  # what the user should know
    name: str  # of the folder that is written, if nothing else is said


def is_run(path: str) -> bool:
    """Whether a folder is that of a run that has trained weights: one of `shoestring compress` has packed ones."""
    return (Path(path) / "run.json").exists() and not (Path(path) / MANIFEST).exists()


def opened(path: str, flags: Mapping[str, Any], best: bool = True, job: Named | None = None) -> ModelSource:
    """A run, with the weights that were best in validation or the newest, weights of a file, or a job with its own. `job`: makes the model
    of the run, or of the weights; `flags`: of that job."""
    if is_run(path):
        return from_run(Folder(Path(path)), best, job, flags)
    if job is not None and is_weights(path):
        return from_weights(path, job, flags)
    return from_job(path, flags)


def from_weights(path: str, named: Named, flags: Mapping[str, Any], model: nn.Module | None = None) -> ModelSource:
    """The model that a job makes, or the one that is given, with weights of a file; names and shapes that do not fit are refused by
    name."""
    check_weights(path)
    job, pickled = named_job(Claim(Path(path)), named, flags)[0], path.endswith(PICKLES)
    if model is not None:
        own = model
        job = replace(job, model=lambda: own, origin=None)  # the job's file does not make it
    job = job if job.origin is not None else with_copies(job)
    if pickled:
        job = replace(job, weights="")
        load_state(made := fresh_model(job), Path(path))
    else:
        job, made = with_file(job, path)
    how = (
        about(Path(job.origin.file), dict(job.origin.flags))
        if job.origin is not None
        else {"job": None, "edits": [], "decoded": False}
    )
    said = None if pickled else weights_taken(made, job)
    return ModelSource(
        job, prepared(made), how, (said.note,) if said is not None and said.note else (), Path(path).stem
    )


def with_file(job: Job, path: str) -> tuple[Job, nn.Module]:
    """The job whose weights are those of a file, and its model. Where the names in the file are not the model's own, they are renamed as
    the job's own `Weights(...)` says."""
    rules, plain = as_weights(job.weights), replace(job, weights=path)
    try:
        return plain, fresh_model(plain)
    except Mistake:
        if rules is None or not (rules.remove_prefix or rules.add_prefix or rules.new):
            raise
    renamed = replace(job, weights=replace(rules, files=path))
    return renamed, fresh_model(renamed)


def load_state(model: nn.Module, path: Path) -> None:
    """Give a model the state dict that torch.save wrote. torch reads tensors alone (weights_only), and refuses all that could run code."""
    try:
        with open(path, "rb", opener=regular) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, of files that are none too
        raise Mistake(
            f"{path} is not a state dict of tensors alone ({type(error).__name__}: {str(error).splitlines()[0][:200]}), and "
            f"nothing else is read of a pickle, which can run code: save model.state_dict() alone"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(one, Tensor) for one in state.values()):
        inner = (
            [str(key) for key, one in state.items() if isinstance(one, Mapping)] if isinstance(state, Mapping) else []
        )
        raise Mistake(
            f"{path} holds no state dict, but a {type(state).__name__}{f' with {chr(44).join(inner[:3])} in it' * bool(inner)}"
            f": save the model's state_dict() alone"
        )
    own = model.state_dict()
    for name in sorted({*own, *state}):
        if name not in state or name not in own:
            raise Mistake(
                f"{path} {'has no' if name in own else 'has'} {name}, which the job's model {'has' if name in own else 'has not'}"
                f": give the job that makes the model of these weights"
            )
        if own[name].shape != state[name].shape:
            raise Mistake(
                f"{name} is {list(state[name].shape)} in {path} and {list(own[name].shape)} in the job's model: give the job, "
                f"and the flags, that these weights were trained with"
            )
    model.load_state_dict(dict(state))


def from_job(path: str, flags: Mapping[str, Any]) -> ModelSource:
    job = loaded_job(job_path(path), dict(flags))
    notes = () if job.weights else (UNTRAINED.format(Path(path).name),)
    return ModelSource(job, prepared(fresh_model(job)), about(Path(job_path(path)), flags), notes, Path(path).stem)


UNTRAINED = (
    "{} names no weights, so the model is compressed as the job's factory makes it; if that is untrained, give the folder of a "
    "run of it instead, or Job(weights=...)"
)


def from_run(folder: Folder, best: bool, named: Named | None, flags: Mapping[str, Any]) -> ModelSource:
    job, notes = named_job(claim_of_run(folder), named, flags)
    if job.origin is not None:
        changed = changes(kept_modules(folder) or {}, imported_modules(), Path(job.origin.file).parent).changed
        notes += [
            f"{changed_text(name)}: what it computes with the run's weights may be something else" for name in changed
        ]
    job = job if job.origin is not None else with_copies(job)
    model = filled(job, folder, best, notes)
    how = (
        about(Path(job.origin.file), dict(job.origin.flags))
        if job.origin is not None
        else {"job": None, "edits": [], "decoded": False}
    )
    return ModelSource(job, prepared(model), how, tuple(notes), folder.path.name)


def filled(job: Job, folder: Folder, best: bool, notes: list[str]) -> nn.Module:
    """The job's model with the weights of a run; adds to the notes what the user should know of them."""
    try:
        checkpoint = best_weights(folder) if best else checkpoint_of(folder, None)
    except Mistake:
        checkpoint = checkpoint_of(folder, None)
        if newer := newer_weights(folder, checkpoint):
            notes.append(newer)
    return with_weights(job, checkpoint)


def with_weights(job: Job, checkpoint: RunCheckpoint, trained: bool = False) -> nn.Module:
    """The job's model with the weights of a checkpoint. `trained`: not their averages."""
    model = fresh_model(job)
    own = model.state_dict()
    weights = named_weights(checkpoint, frozenset(own), trained)
    missing = [name for name in own if name not in weights]
    if missing:
        raise Mistake(
            f"the checkpoint of step {checkpoint.step} has no {missing[0]}, which the job's model has: the job changed"
        )
    for name, value in own.items():
        if tuple(weights[name].shape) != tuple(value.shape):
            raise Mistake(
                f"{name} is {tuple(weights[name].shape)} in the checkpoint of step {checkpoint.step} and {tuple(value.shape)} in "
                f"the job's model: give the job, and the flags, that the run was trained with"
            )
    with torch.no_grad():
        for name, value in own.items():
            flat, place = value.reshape(-1), 0
            assert flat.data_ptr() == value.data_ptr() or not value.numel(), "a model's own tensors lie together"
            for piece in weights[name].pieces():
                flat[place : place + piece.numel()] = piece.reshape(-1).to(value.dtype)
                place += piece.numel()
    return model


def with_copies(job: Job) -> Job:
    """The job of a script, whose factory may give one and the same model every time: that stays as it is."""
    make = job.model
    return replace(job, model=lambda: copied(make()))


def copied(model: nn.Module) -> nn.Module:
    """The user's own stays in its mode, on its device, with its gradients."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module's own copying, or torch's, which refuses tensors that were computed
        raise Mistake(
            f"model= can't be copied ({type(error).__name__}: {error}): it is compressed as a copy, so that yours stays as "
            f"it is; save its weights and name them in the Job instead: Job(weights=...)"
        ) from error


def prepared(model: nn.Module) -> nn.Module:
    """The model, ready to be looked at. All of this room works on the CPU, where the packed model is measured; healing alone trains on a
    GPU."""
    return model.cpu().eval().requires_grad_(False)


def about(file: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """How a job is named in a manifest: its file, or its built-in name, what it held, and its flags."""
    built_in = next((name for name in BUILT_IN if Path(job_path(name)) == file), "")
    return {
        "job": {
            "file": built_in or str(file.resolve()),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "flags": dict(flags),
        },
        "edits": [],
        "decoded": False,
    }


@dataclass(frozen=True)
class CalibrationSamples:
    """Batches for three uses, none in two of them."""

    calibration: list[Batch]
    checked: list[Batch]
    unseen: list[Batch]
    notes: tuple[str, ...]
    deciding: list[Batch] = field(
        default_factory=list
    )  # that a metric is decided on, `checked` among them; else `checked`


def samples_of(job: Job, unseen: int = UNSEEN, by_metric: bool = False) -> CalibrationSamples:
    """Calibration from the training data; what is confirmed and reported on from the held-out data, or, without those, from further
    training batches of the same round. `by_metric`: a metric decides, whose noise needs many samples: half of them are for that."""

    def taken(batches: Iterator[Batch], count: int) -> list[Batch]:
        found: list[Batch] = []
        while sum(map(counted, found)) < count and (batch := next(batches, None)) is not None:
            found.append(mapped(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch))
        return found

    with looking(job) as feed:
        batches = one_round(feed)
        calibration = taken(batches, CALIBRATION)
        beside = [] if job.held_out is not None else taken(batches, CHECKED + unseen)
    notes: list[str] = []
    if job.held_out is not None:
        with looking(job, data=job.held_out) as feed:
            beside = taken(one_round(feed), CHECKED + unseen)
    beside = parted(beside, 4)
    if len(beside) < 2:
        calibration = parted(calibration, 3)
        third = len(calibration) // 3
        beside = [*calibration[len(calibration) - 2 * third :], *beside]
        calibration = calibration[: len(calibration) - 2 * third]
    if not calibration or len(beside) < 2:
        raise Mistake(
            f"the job's data gave {len(calibration) + len(beside)} samples or batches in a round: compressing needs some to "
            f"calibrate with and others to measure on; give the Job more data, or held_out=lambda: batches"
        )
    part = max(1, min(len(beside) // 4, -(-CHECKED // max(counted(beside[0]), 1))))
    half = max(part, len(beside) // 2) if by_metric else part
    told = sum(map(counted, beside[half:]))
    if told < 200:
        notes.append(
            f"fidelity is measured on {told} samples that nothing was chosen by: a small number; give the Job more data, or "
            f"held_out"
        )
    return CalibrationSamples(calibration, beside[:part], beside[half:], tuple(notes), beside[:half])


def parted(batches: list[Batch], least: int) -> list[Batch]:
    """At least so many batches, of a few that are cut, as far as they can be."""

    def pieces(batch: Batch) -> list[Batch]:
        try:
            return split(batch, min(-(-least // len(batches)), samples(batch)))
        except Mistake:
            return [batch]

    return batches if len(batches) >= least else [piece for batch in batches for piece in pieces(batch)]


def one_round(feed: Any) -> Iterator[Batch]:
    for batch in feed:
        if feed.epoch:
            return
        yield batch


def counted(batch: Batch) -> int:
    try:
        return samples(batch)
    except Mistake:
        return 1
