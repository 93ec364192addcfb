"""Training as a room: what it supplies to the code that all rooms share."""

from __future__ import annotations

from shoestring.core.command import Command
from shoestring.core.rooms import RoomPlugin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar

    from shoestring.processes.task import Task

JOBS = (
    "The job's own arguments are flags too: name the job before --help to see them. Built-in jobs: gpt (a byte-level "
    "transformer on Python's own source), digits (a conv net)"
)
OPTIONS = "shoestring.training.options"


class TrainingPlugin(RoomPlugin):
    name: ClassVar[str] = "training"
    preloaded: ClassVar[tuple[str, ...]] = (
        "torch._dynamo",  # an optimizer's first step imports the compiler, which takes as long as all the rest
        "shoestring.training.links.process_link",
        "shoestring.training.evidence.rehearse",
        "shoestring.training.plan",
        "shoestring.training.execution.training",
    )

    def commands(self) -> tuple[Command, ...]:
        return (
            Command(
                "plan",
                "choose and explain the best plan for a job and a budget",
                f"{OPTIONS}:PlanCommand",
                "shoestring.training.commands.plan:run",
                JOBS,
                job_flags=True,
            ),
            Command(
                "train",
                "train a job by the best plan, and show predicted and measured figures",
                f"{OPTIONS}:TrainCommand",
                "shoestring.training.commands.train:run",
                JOBS,
                job_flags=True,
                keeps_result=True,
                runs=True,
            ),
            Command(
                "verify",
                "compare plain training with the plan, from the same seed: are the weights the same?",
                f"{OPTIONS}:VerifyCommand",
                "shoestring.training.commands.verify:run",
                JOBS,
                job_flags=True,
            ),
            Command(
                "doctor",
                "devices, memory, which dtypes really work, disk speed, what is missing",
                f"{OPTIONS}:DoctorCommand",
                "shoestring.training.commands.doctor:run",
            ),
        )

    def tasks(self) -> Mapping[str, type[Task[Any]]]:
        from shoestring.training.execution.tasks import TASKS

        return TASKS


TRAINING = TrainingPlugin()
