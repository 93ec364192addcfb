"""Load what is served: a run, a folder of `shoestring compress`, weights or a job, as an engine. Called in the model process.

What is loaded is named by the caller: no path in a folder is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.formats.manifest import MANIFEST
from shoestring.compression.loading.load import load
from shoestring.compression.loading.source import one_epoch, open_source
from shoestring.core.batch import Batch
from shoestring.core.job import Job
from shoestring.data.feed import looking
from shoestring.processes.named_job import Claim, claim_of_run, named_job
from shoestring.runs.folder import Folder
from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.engines.onnx_engine import OnnxEngine
from shoestring.serving.engines.signature import ModelInterface, find_interface
from shoestring.serving.engines.torch_engine import TorchEngine
from shoestring.serving.sample import Sample

BATCHES = 8  # of the job's data that are looked at


@dataclass(frozen=True)
class ServedSource:
    """What a user named."""

    path: str  # of a run, a compressed model, weights or a job
    job: str | None = None  # the job of a run, of weights or of a compressed model
    flags: Mapping[str, Any] = field(default_factory=dict)  # of the job
    newest: bool = False  # of a run: the newest weights, not those that were best in validation

    @property
    def arguments(self) -> dict[str, Any]:
        """As JSON carries them to the process that loads it."""
        return {**asdict(self), "flags": dict(self.flags)}

    @property
    def is_packed(self) -> bool:
        return (Path(self.path) / MANIFEST).exists()

    @property
    def name(self) -> str:
        """Of the model, in addresses: as its file or folder is called, also where that is given as `.`"""
        return Path(os.path.abspath(self.path)).name.removesuffix(".py") or "model"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory, with its job."""

    job: Job
    model: nn.Module
    notes: tuple[str, ...] = ()

    def interface(self) -> ModelInterface:
        self.model.eval()
        return find_interface(self.model, self.job.forward, batches=list(batches_of(self.job)))


def opened_model(source: ServedSource) -> LoadedModel:
    """Raises Mistake where there are no weights, or they do not fit the job."""
    if source.is_packed:
        job, notes = named_job(packed_claim(source), source.job, source.flags)
        return LoadedModel(job, load(source.path, job=source.job, decoded=True, **source.flags), tuple(notes))
    found = open_source(source.path, source.flags, best=not source.newest, job=source.job)
    return LoadedModel(found.job, found.model, found.notes)


def job_of(source: ServedSource) -> Job:
    """The job alone, whose `answer` the process that listens calls."""
    if source.is_packed:
        return named_job(packed_claim(source), source.job, source.flags)[0]
    if (Path(source.path) / "run.json").exists():
        return named_job(claim_of_run(Folder(Path(source.path))), source.job, source.flags)[0]
    return named_job(Claim(Path(source.path)), source.job or source.path, source.flags)[0]


def packed_claim(source: ServedSource) -> Claim:
    from shoestring.compression.formats.packed_folder import PackedModel

    return PackedModel(Path(source.path)).claim or Claim(Path(source.path))


def batches_of(job: Job) -> Iterator[Batch]:
    """Some batches like those that will be asked for: of what is held out, if there is anything."""
    with looking(job, data=job.held_out) as feed:
        yield from islice(one_epoch(feed), BATCHES)


def torch_engine(
    path: str, job: str | None, flags: Mapping[str, Any], newest: bool, pack: bool = True
) -> ServingEngine:
    """What a model process loads."""
    found = opened_model(ServedSource(path, job, flags, newest))
    return TorchEngine(found.model, found.job.forward, found.interface(), pack=pack)


def onnx_engine(
    path: str, job: str | None, flags: Mapping[str, Any], newest: bool, file: str, int8: bool
) -> ServingEngine:
    """The same with onnxruntime; `file` is written."""
    found = opened_model(ServedSource(path, job, flags, newest))
    return OnnxEngine(found.model, found.job.forward, found.interface(), Path(file), fast=int8)


def several(samples: Sequence[Sample], count: int) -> list[Sample]:
    """So many samples, evenly from the shortest to the longest."""
    ordered = sorted(samples, key=lambda one: one.length)
    return [ordered[place * (len(ordered) - 1) // max(count - 1, 1)] for place in range(count)]
