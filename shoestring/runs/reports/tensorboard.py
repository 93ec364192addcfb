"""TensorBoard event files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoestring.runs.events.event import Begun, Event, Stepped, Validated, Warned


class Board:
    """Writes a run's scalars for TensorBoard; steps lost before a resume are removed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.kind = str(folder / "tensorboard"), SummaryWriter
        self.writer: Any = None

    def add(self, event: Event) -> None:
        if isinstance(event, Begun):
            self.writer = self.kind(self.folder, purge_step=event.step + 1)
        elif isinstance(event, Stepped) and self.writer is not None:
            for name, value in (
                ("loss", event.loss),
                ("seconds a step", event.seconds),
                ("bytes of the process", event.process),
            ):
                self.writer.add_scalar(name, value, event.step, walltime=event.time)
        elif isinstance(event, Validated) and self.writer is not None:
            for metric, number in event.metrics.items():
                if number is not None:
                    self.writer.add_scalar(f"validation/{metric}", number, event.step, walltime=event.time)
        elif isinstance(event, Warned) and self.writer is not None:
            self.writer.add_text("warning", event.text)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
