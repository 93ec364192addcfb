"""The planner's earlier choice for the same question: among plans within timing noise, it is chosen again.

Times are measured, so planning the same command twice may rank two plans of similar speed differently, and if they
round differently, the weights differ. The choice is kept beside the machine's figures; a plan that no longer fits, or
is slower than others by more than noise, is not chosen again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.measure.cache import read_cached, write_cached
from shoestring.measure.probe import hardware_file
from shoestring.training.evidence.tasks import TechniqueSpec, specs_of, techniques_of
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.technique import TrainingTechnique as Technique

MOST = 500  # number of answers that are kept


@dataclass(frozen=True)
class KeptChoice:
    """What is stored of a plan."""

    techniques: tuple[TechniqueSpec, ...]


def place_of(file: str, asked: Mapping[str, Any]) -> Path:
    """The path for the answer to a question: a job file and its options, on this machine."""
    machine = hardware_file()
    question = {"source": hashlib.sha256(Path(file).read_bytes()).hexdigest(), "machine": machine.stem} | dict(asked)
    written = json.dumps(question, sort_keys=True, default=str)
    return machine.parent / "plans" / f"{hashlib.sha256(written.encode()).hexdigest()[:32]}.json"


def chosen_earlier(place: Path) -> tuple[Technique, ...] | None:
    found = read_cached(place, KeptChoice)
    with suppress(Mistake):  # written by another version
        return techniques_of(found.techniques) if found is not None else None
    return None


def remember_choice(place: Path, chosen: TrainingPlan) -> None:
    write_cached(place, KeptChoice(specs_of(chosen.techniques)))
    with suppress(OSError):
        known = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in known[:-MOST]:
            old.unlink(missing_ok=True)
