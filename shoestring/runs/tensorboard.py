"""TensorBoard event files of a run."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake


def needs_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise Mistake("--tensorboard needs the package tensorboard: pip install 'shoestring[tensorboard]'")


class Board:
    """Writes what a person wants to see in TensorBoard; lost steps of a resumed run are taken back."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.kind = str(folder / "tensorboard"), SummaryWriter
        self.writer: Any = None

    def add(self, event: dict[str, Any]) -> None:
        if event["event"] == "begun":
            self.writer = self.kind(self.folder, purge_step=event["step"] + 1)
        elif event["event"] == "step" and self.writer is not None:
            for name, key in (("loss", "loss"), ("seconds a step", "seconds"), ("bytes of the process", "process")):
                self.writer.add_scalar(name, event[key], event["step"], walltime=event["time"])
        elif event["event"] == "warning" and self.writer is not None:
            self.writer.add_text("warning", event["text"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
