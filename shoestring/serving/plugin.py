"""What serving brings to the code that all rooms share."""

from __future__ import annotations

from shoestring.core.command_line.command import Command
from shoestring.core.rooms import RoomPlugin, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar

    from shoestring.core.figures import Quantity
    from shoestring.processes.task import Task
    from shoestring.runs.events.event import Event

JOBS = "The job's own arguments are flags too: name the job before --help to see them."


class ServingPlugin(RoomPlugin):
    name: ClassVar[str] = "serving"
    verb: ClassVar[Verb] = Verb("serve", "serving", "served")
    counts: ClassVar[str] = "request"

    def commands(self) -> tuple[Command, ...]:
        return (
            Command(
                "serve",
                "a target in, the best server out: batching, replicas, engine chosen and explained",
                "shoestring.serving.options:ServeCommand",
                "shoestring.serving.command:run",
                JOBS,
                job_flags=True,
                keeps_result=True,
                runs=True,
            ),
            Command(
                "load",
                "a load test: requests at a rate, and how long answers take",
                "shoestring.serving.load.options:LoadCommand",
                "shoestring.serving.load.command:run",
            ),
        )

    def events(self) -> tuple[type[Event], ...]:
        from shoestring.serving.events import Listening, Served, ServerChanged

        return Listening, Served, ServerChanged

    def quantities(self) -> tuple[Quantity, ...]:
        from shoestring.serving.room import QUANTITIES

        return QUANTITIES

    def tasks(self) -> Mapping[str, type[Task[Any]]]:
        from shoestring.serving.measuring.calibrate import CalibrateTask

        return {CalibrateTask.kind: CalibrateTask}


SERVING = ServingPlugin()
