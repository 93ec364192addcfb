"""What training brings to the code that all rooms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.rooms import RoomPlugin

if TYPE_CHECKING:
    from shoestring.processes.task import Task


class TrainingPlugin(RoomPlugin):
    name: ClassVar[str] = "training"
    preloaded: ClassVar[tuple[str, ...]] = (
        "torch._dynamo",  # an optimizer's first step imports the compiler, which takes as long as all the rest
        "shoestring.training.links.process_link",
        "shoestring.training.evidence.rehearse",
        "shoestring.training.plan",
        "shoestring.training.execution.training",
    )

    def tasks(self) -> Mapping[str, type[Task[Any]]]:
        from shoestring.training.execution.tasks import TASKS

        return TASKS


TRAINING = TrainingPlugin()
