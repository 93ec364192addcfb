"""Tasks for worker processes, in few words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.training.evidence.tasks import TechniqueSpec
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import TrainTask


def train_task(
    file: Path,
    steps: int,
    techniques: Iterable[Mapping[str, Any]] = (),
    folder: Path | str = "",
    cadence: Mapping[str, int] | None = None,
    flags: Mapping[str, Any] | None = None,
    weights: str = "",
) -> TrainTask:
    """Train a job file under techniques ({"name", "knobs"}), in a run folder if one is named."""
    recording = RecordingSettings(str(folder), Cadence(**dict(cadence or {}))) if folder else None
    return TrainTask(
        file=str(file),
        flags=dict(flags or {}),
        techniques=tuple(TechniqueSpec(**one) for one in techniques),
        steps=steps,
        recording=recording,
        weights=weights,
    )
