"""Open the model to compress, from a run, a job or a file of weights, and draw calibration and evaluation samples."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.formats.manifest import MANIFEST
from shoestring.compression.loading.pickled_state import load_state
from shoestring.compression.loading.weight_source import check_onnx, check_weights, is_onnx, is_weights
from shoestring.core.batch import Batch, map_leaves, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.model.weights import PICKLES, as_weights
from shoestring.data.feed import looking
from shoestring.jobfile import BUILT_IN, job_path, load_job
from shoestring.processes.named_job import Claim, Named, claim_of_run, named_job
from shoestring.runs.checkpoints.checkpoints import RunCheckpoint
from shoestring.runs.folder import Folder
from shoestring.runs.modules import imported_modules, modules_of_file
from shoestring.runs.reports.export import best_weights, checkpoint_of, named_weights, newer_weights
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.runs.weights.initial_weights import source as weights_taken

CALIBRATION = 256  # samples for calibration
CHECKED = 192  # samples on which plans are confirmed
UNSEEN = 1024  # samples on which only the report is measured


@dataclass(frozen=True)
class ModelSource:
    """A trained model with its job."""

    job: Job
    model: nn.Module
    about: Mapping[str, Any]  # the manifest's entries on how to build the model again
    notes: tuple[str, ...]  # messages for the user
    name: str  # default name of the folder to write
    file: Path | None = None  # the ONNX file that it was read from
    check: Callable[[Batch], None] | None = None  # refuses a model that can't be calibrated on such batches


def is_run(path: str) -> bool:
    """Whether a folder is that of a run that has trained weights: one of `shoestring compress` has packed ones."""
    return (Path(path) / "run.json").exists() and not (Path(path) / MANIFEST).exists()


def open_source(path: str, flags: Mapping[str, Any], best: bool = True, job: Named | None = None) -> ModelSource:
    """Open a run (with its best or newest weights), a file of weights, or a job with weights of its own.

    `job`: builds the model for the run or the file; `flags`: of that job.
    """
    if is_run(path):
        return from_run(Folder(Path(path)), best, job, flags)
    if job is not None and is_onnx(path):
        return from_onnx(path, job, flags)
    if job is not None and is_weights(path):
        return from_weights(path, job, flags)
    return from_job(path, flags)


def from_onnx(path: str, named: Named, flags: Mapping[str, Any]) -> ModelSource:
    """The graph of an ONNX file, with data from the job."""
    from shoestring.compression.onnx.onnx_source import onnx_model_source

    check_onnx(path)
    job, notes = named_job(Claim(Path(path)), named, flags)
    return onnx_model_source(Path(path), job, notes)


def from_weights(path: str, named: Named, flags: Mapping[str, Any], model: nn.Module | None = None) -> ModelSource:
    """The job's model, or the given one, with weights from a file. Raises Mistake if names or shapes do not match."""
    check_weights(path)
    job, pickled = named_job(Claim(Path(path)), named, flags)[0], path.endswith(PICKLES)
    if model is not None:
        own = model
        job = replace(job, model=lambda: own, origin=None)  # the given model does not come from the job's file
    job = job if job.origin is not None else copy_every_model(job)
    if pickled:
        job = replace(job, weights="")
        notes = load_state(made := fresh_model(job), Path(path))
    else:
        job, made = job_with_file(job, path)
        said = weights_taken(made, job)
        notes = (said.note,) if said is not None and said.note else ()
    return ModelSource(job, prepare_model(made), manifest_entries(job), notes, Path(path).stem)


def job_with_file(job: Job, path: str) -> tuple[Job, nn.Module]:
    """The job with the weights of a file, and its model. If names in the file differ from the model's, they are renamed
    by the job's own `Weights(...)`."""
    rules, plain = as_weights(job.weights), replace(job, weights=path)
    try:
        return plain, fresh_model(plain)
    except Mistake:
        if rules is None or not (rules.remove_prefix or rules.add_prefix or rules.new):
            raise
    renamed = replace(job, weights=replace(rules, files=path))
    return renamed, fresh_model(renamed)


def from_job(path: str, flags: Mapping[str, Any]) -> ModelSource:
    job = load_job(job_path(path), dict(flags))
    notes = () if job.weights else (UNTRAINED.format(Path(path).name),)
    return ModelSource(
        job, prepare_model(fresh_model(job)), job_file_entries(Path(job_path(path)), flags), notes, Path(path).stem
    )


UNTRAINED = (
    "{} names no weights, so the model is compressed as the job's factory builds it; if it is untrained, give the folder of "
    "a run instead, or Job(weights=...)"
)


def from_run(folder: Folder, best: bool, named: Named | None, flags: Mapping[str, Any]) -> ModelSource:
    job, notes = named_job(claim_of_run(folder), named, flags)
    job = job if job.origin is not None else copy_every_model(job)
    model = model_of_run(job, folder, best, notes)
    about = manifest_entries(job)
    return ModelSource(job, prepare_model(model), about, tuple(notes), folder.path.name)


def model_of_run(job: Job, folder: Folder, best: bool, notes: list[str]) -> nn.Module:
    """The job's model with the weights of a run. Messages for the user are appended to `notes`."""
    try:
        checkpoint = best_weights(folder) if best else checkpoint_of(folder, None)
    except Mistake:
        checkpoint = checkpoint_of(folder, None)
        if newer := newer_weights(folder, checkpoint):
            notes.append(newer)
    return model_of_checkpoint(job, checkpoint)


def model_of_checkpoint(job: Job, checkpoint: RunCheckpoint, trained: bool = False) -> nn.Module:
    """The job's model with the weights of a checkpoint. `trained`: the weights themselves, not their running
    averages."""
    model = fresh_model(job)
    own = model.state_dict()
    weights = named_weights(checkpoint, trained)
    missing = [name for name in own if name not in weights]
    if missing:
        raise Mistake(
            f"the checkpoint of step {checkpoint.step} has no {missing[0]}, but the job's model has: the job has changed"
        )
    for name, value in own.items():
        if tuple(weights[name].shape) != tuple(value.shape):
            raise Mistake(
                f"{name} has the shape {tuple(weights[name].shape)} in the checkpoint of step {checkpoint.step} and "
                f"{tuple(value.shape)} in the job's model: give the job and the flags with which the run was trained"
            )
    with torch.no_grad():
        for name, value in own.items():
            flat, place = value.reshape(-1), 0
            assert flat.data_ptr() == value.data_ptr() or not value.numel(), "parameters are contiguous"
            for piece in weights[name].pieces():
                flat[place : place + piece.numel()] = piece.reshape(-1).to(value.dtype)
                place += piece.numel()
    return model


def copy_every_model(job: Job) -> Job:
    """The job of a script, with its models copied: its factory may return the same object every time, which stays
    unchanged."""
    make = job.model
    return replace(job, model=lambda: copy_model(make()))


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of the user's model, whose mode, device and gradients stay as they are."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module's own __deepcopy__, or torch's, which refuses non-leaf tensors
        raise Mistake(
            f"model= can't be copied ({type(error).__name__}: {error}): a copy is compressed, so that yours stays as it is; "
            f"save its weights and name them in the Job instead: Job(weights=...)"
        ) from error


def prepare_model(model: nn.Module) -> nn.Module:
    """Move the model to the CPU, in eval mode and without gradients. All compression happens there, because packed
    models are measured there; only healing may use a GPU."""
    return model.cpu().eval().requires_grad_(False)


def manifest_entries(job: Job) -> dict[str, Any]:
    """The manifest's entries about the job: its file and flags, if it comes from a file."""
    if job.origin is None:
        return {"job": None, "edits": [], "decoded": 0}
    return job_file_entries(Path(job.origin.file), dict(job.origin.flags))


def job_file_entries(file: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's entries for a job file: its path or built-in name, its SHA-256, its flags and its modules."""
    built_in = next((name for name in BUILT_IN if Path(job_path(name)) == file), "")
    return {
        "job": {
            "file": built_in or str(file.resolve()),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "flags": dict(flags),
            "modules": imported_modules(modules_of_file(file)),
        },
        "edits": [],
        "decoded": 0,
    }


@dataclass(frozen=True)
class CalibrationSamples:
    """Disjoint batches for three purposes."""

    calibration: list[Batch]  # to collect statistics
    checked: list[Batch]  # to confirm plans
    unseen: list[Batch]  # to measure what is reported
    notes: tuple[str, ...]
    deciding: list[Batch] = field(default_factory=list)  # to decide on a metric; includes `checked`


def samples_of(job: Job, unseen: int = UNSEEN, by_metric: bool = False) -> CalibrationSamples:
    """Draw calibration samples from the training data, and the others from the held-out data or, without it, from
    further batches of the same training epoch. `by_metric`: a noisy metric decides, so half of the samples are used for
    that."""

    def take(batches: Iterator[Batch], count: int) -> list[Batch]:
        found: list[Batch] = []
        while sum(map(sample_count, found)) < count and (batch := next(batches, None)) is not None:
            found.append(map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch))
        return found

    with looking(job) as feed:
        batches = one_epoch(feed)
        calibration = take(batches, CALIBRATION)
        beside = [] if job.held_out is not None else take(batches, CHECKED + unseen)
    notes: list[str] = []
    if job.held_out is not None:
        with looking(job, data=job.held_out) as feed:
            beside = take(one_epoch(feed), CHECKED + unseen)
    beside = split_batches(beside, 4)
    if len(beside) < 2:
        calibration = split_batches(calibration, 3)
        third = len(calibration) // 3
        beside = [*calibration[len(calibration) - 2 * third :], *beside]
        calibration = calibration[: len(calibration) - 2 * third]
    if not calibration or len(beside) < 2:
        raise Mistake(
            f"the job's data has {len(calibration) + len(beside)} samples or batches per epoch: compressing needs some to "
            f"calibrate and others to measure; give the Job more data, or held_out=lambda: batches"
        )
    part = max(1, min(len(beside) // 4, -(-CHECKED // max(sample_count(beside[0]), 1))))
    half = max(part, len(beside) // 2) if by_metric else part
    told = sum(map(sample_count, beside[half:]))
    if told < 200:
        notes.append(f"fidelity is measured on only {told} unseen samples; give the Job more data, or held_out")
    return CalibrationSamples(calibration, beside[:part], beside[half:], tuple(notes), beside[:half])


def split_batches(batches: list[Batch], least: int) -> list[Batch]:
    """Split batches until there are at least `least`, as far as they can be split."""

    def pieces(batch: Batch) -> list[Batch]:
        try:
            return split(batch, min(-(-least // len(batches)), samples(batch)))
        except Mistake:
            return [batch]

    return batches if len(batches) >= least else [piece for batch in batches for piece in pieces(batch)]


def one_epoch(feed: Any) -> Iterator[Batch]:
    for batch in feed:
        if feed.epoch:
            return
        yield batch


def sample_count(batch: Batch) -> int:
    try:
        return samples(batch)
    except Mistake:
        return 1
