"""How often a run is saved. Nothing heavy is imported here: the command line reads it from what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """Every so many steps, or every so many seconds."""

    steps: int = 0  # 0: by time
    seconds: float = 60.0
    keep: int = 3  # checkpoints, beside the best one
