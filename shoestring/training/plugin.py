"""Training as a room: what it supplies to the code that all rooms share."""

from __future__ import annotations

from shoestring.core.command_line.command import Command, ExportFormat
from shoestring.core.rooms import RoomPlugin, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar

    from shoestring.processes.task import Task
    from shoestring.runs.events.history import History
    from shoestring.runs.folder import Folder
    from shoestring.runs.request import Request
    from shoestring.training.report.page import TrainingPage, TrainingReport

JOBS = (
    "The job's own arguments are flags too: name the job before --help to see them. Built-in jobs: gpt (a byte-level "
    "transformer on Python's own source), digits (a conv net)"
)
OPTIONS = "shoestring.training.options"


class TrainingPlugin(RoomPlugin):
    name: ClassVar[str] = "training"
    verb: ClassVar[Verb] = Verb("train", "training", "trained")
    place: ClassVar[int] = 10
    preloaded: ClassVar[tuple[str, ...]] = (
        "torch._dynamo",  # an optimizer's first step imports the compiler, which takes as long as all the rest
        "shoestring.training.links.process_link",
        "shoestring.training.evidence.rehearse",
        "shoestring.training.planning.plan",
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

    def exports(self) -> tuple[ExportFormat, ...]:
        write = "shoestring.training.memory.adapters.adapter_folder:export_adapter"
        return (ExportFormat("peft", "what LowRank trained, as an adapter", "-peft", write),)

    def part(self, request: Request, history: History, folder: Folder) -> TrainingReport | None:
        from shoestring.runs.events.event import Finished
        from shoestring.training.report.page import training_report

        return training_report(folder) if isinstance(history.doing, Finished) else None

    def page(self) -> TrainingPage:
        from shoestring.training.report.page import TrainingPage

        return TrainingPage(self)

    def tasks(self) -> Mapping[str, type[Task[Any]]]:
        from shoestring.training.execution.tasks import TASKS

        return TASKS


TRAINING = TrainingPlugin()
