"""Federation as a room: what it supplies to the code that all rooms share."""

from __future__ import annotations

from shoestring.core.command_line.command import Command
from shoestring.core.rooms import RoomPlugin, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from shoestring.core.figures import Quantity
    from shoestring.federated.playing.fold import FederationReport
    from shoestring.federated.report.page import FederatedPage
    from shoestring.runs.events.event import Event
    from shoestring.runs.events.history import History
    from shoestring.runs.folder import Folder
    from shoestring.runs.request import Request

TECHNIQUES = "shoestring.federated"  # the group of entry points for techniques of other packages


class FederatedPlugin(RoomPlugin):
    name: ClassVar[str] = "federated"
    verb: ClassVar[Verb] = Verb("train", "training", "trained")
    place: ClassVar[int] = 20
    counts: ClassVar[str] = "round"

    def commands(self) -> tuple[Command, ...]:
        return (
            Command(
                "federate",
                "train or tune where the data are: updates leave a device, records never do",
                "shoestring.federated.options:FederateCommand",
                "shoestring.federated.commands.command:run",
                "The job's own arguments are flags too: name the job before --help to see them. Built-in jobs with clients: "
                "digits, authors",
                job_flags=True,
                keeps_result=True,
                runs=True,
            ),
        )

    def cautions(self, request: Request) -> tuple[str, ...]:
        from shoestring.federated.techniques.private.release import NOT_PRIVATE

        return (NOT_PRIVATE,) if request.asked.get("insecure_seed") is not None else ()

    def events(self) -> tuple[type[Event], ...]:
        from shoestring.federated.events import RoundFinished

        return (RoundFinished,)

    def quantities(self) -> tuple[Quantity, ...]:
        from shoestring.federated.quantities import FEDERATED

        return FEDERATED

    def page(self) -> FederatedPage:
        from shoestring.federated.report.page import FederatedPage

        return FederatedPage(self)

    def part(self, request: Request, history: History, folder: Folder) -> FederationReport:
        from shoestring.federated.playing.fold import federation_report

        return federation_report(request.asked, history, folder)


FEDERATED = FederatedPlugin()
