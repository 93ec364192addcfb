"""A task for devices: a configuration with attached models. Results and telemetry come back; records stay on devices.

    task.json                 the configuration, with a checksum
    models/NAME.f32           weights, a row of 32-bit numbers each, identified by their SHA-256

A device runs the job file named by `code`, and refuses if its own copy has another SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Unreadable, from_json, to_json
from shoestring.core.files.files import draft_file
from shoestring.core.files.regular import read_regular
from shoestring.core.files.seal import Damaged, seal, unseal
from shoestring.core.job import target
from shoestring.federated.tasks.privacy.release import LEAST
from shoestring.federated.tasks.settings import TuneCandidate

KINDS = ("train", "evaluate", "tune", "compare")
FILE = "task.json"


@dataclass(frozen=True)
class Attachment:
    """A file that belongs to a task."""

    name: str
    path: str  # relative to the task's folder
    sha256: str
    size: int  # bytes


@dataclass(frozen=True)
class Code:
    """The job file that devices run, and its flags."""

    file: str
    sha256: str
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FederatedTask:
    VERSION: ClassVar[int] = 1

    kind: str  # one of KINDS
    code: Code
    models: tuple[Attachment, ...]
    candidates: tuple[TuneCandidate, ...] = ()  # for a comparison: A and B
    goal: str = "min loss"  # the metric that tuning optimizes
    by: str = "devices"  # means over "devices" or "samples"
    seed: int = 0
    least: int = LEAST  # results are released for at least so many devices
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of histograms, by metric
    parameters: Mapping[str, Any] = field(default_factory=dict)  # for training: rounds, techniques; for tuning: halving

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(
                f"a task of the kind {self.kind!r}: there are {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}"
            )
        if self.by not in ("devices", "samples"):
            raise Mistake(f'by={self.by!r} in a task: means are over "devices" or "samples"')
        if self.kind == "compare" and len(self.candidates) != 2:
            raise Mistake(f"a comparison of {len(self.candidates)} candidates: give two, A and B")
        if self.kind in ("evaluate", "tune") and not self.candidates:
            raise Mistake(f"a task of the kind {self.kind} without candidates: give settings, or models")
        names = [one.name for one in self.models]
        for one in self.candidates:
            if one.model not in names:
                raise Mistake(
                    f"the candidate {one.name!r} is of the model {one.model!r}, and the task has {', '.join(map(repr, names))}"
                )
        target(self.goal)


def code_of(file: str | Path, flags: Mapping[str, Any] | None = None) -> Code:
    return Code(str(file), hashlib.sha256(Path(file).read_bytes()).hexdigest(), dict(flags or {}))


def check_code(code: Code, file: str | Path) -> None:
    """Refuse a job file that is not the one the task was made with."""
    if hashlib.sha256(Path(file).read_bytes()).hexdigest() != code.sha256:
        raise Mistake(
            f"{file} is not the job file of the task: it has another SHA-256; get {code.file} as it was when the task was made"
        )


def attach(name: str, row: Tensor, folder: Path) -> Attachment:
    """Write weights into a task's folder."""
    data = row.detach().to(torch.float32).contiguous().numpy().astype("<f4").tobytes()
    digest = hashlib.sha256(data).hexdigest()
    path = Path("models") / f"{digest[:16]}.f32"
    (folder / "models").mkdir(parents=True, exist_ok=True)
    with draft_file(folder / path) as draft:
        draft.write_bytes(data)
    return Attachment(name, str(path), digest, len(data))


def read_weights(attachment: Attachment, folder: Path) -> Tensor:
    """Read attached weights; a Mistake if the file is not the one that was attached."""
    try:
        file = (folder / attachment.path).resolve()
        if not file.is_relative_to(folder.resolve()):
            raise Mistake(
                f"the model {attachment.name!r} is outside of the task's folder, at {attachment.path}: it is not read"
            )
        data = read_regular(file)
    except FileNotFoundError:
        raise Mistake(f"the model {attachment.name!r} is missing: there is no {file}") from None
    except (OSError, ValueError) as error:  # ValueError: no such path can be
        raise Mistake(f"the model {attachment.name!r} can't be read from {attachment.path!r}: {error}") from error
    if len(data) % 4 or hashlib.sha256(data).hexdigest() != attachment.sha256:
        raise Mistake(
            f"the model {attachment.name!r} is not what was attached: {file} has another SHA-256; attach it again"
        )
    return torch.from_numpy(np.frombuffer(data, "<f4").copy())


def write_task(task: FederatedTask, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with draft_file(folder / FILE) as draft:
        draft.write_bytes(seal(to_json(task)))
    return folder / FILE


def read_task(folder: Path) -> FederatedTask:
    """Read a task; a Mistake if it is damaged, unknown or of a newer version."""
    try:
        return from_json(FederatedTask, unseal(read_regular(folder / FILE))[0])
    except FileNotFoundError:
        raise Mistake(f"there is no task in {folder}: it has no {FILE}") from None
    except (OSError, Damaged, Unreadable) as error:
        raise Mistake(f"{folder / FILE} can't be used: {error}") from error


def read_models(task: FederatedTask, folder: Path) -> dict[str, Tensor]:
    return {one.name: read_weights(one, folder) for one in task.models}
