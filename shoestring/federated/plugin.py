"""What federated runs bring to the code that all rooms share."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoestring.core.rooms import RoomPlugin

if TYPE_CHECKING:
    from shoestring.core.figures import Quantity
    from shoestring.federated.fold import FederationReport
    from shoestring.federated.page import FederatedPage
    from shoestring.runs.event import Event
    from shoestring.runs.folder import Folder
    from shoestring.runs.history import History
    from shoestring.runs.request import Request

TECHNIQUES = "shoestring.federated"  # the group of entry points by which packages bring techniques of a round


class FederatedPlugin(RoomPlugin):
    name: ClassVar[str] = "federated"
    counts: ClassVar[str] = "round"

    def events(self) -> tuple[type[Event], ...]:
        from shoestring.federated.events import RoundFinished

        return (RoundFinished,)

    def quantities(self) -> tuple[Quantity, ...]:
        from shoestring.federated.quantities import FEDERATED

        return FEDERATED

    def page(self) -> FederatedPage:
        from shoestring.federated.page import FederatedPage

        return FederatedPage(self)

    def part(self, request: Request, history: History, folder: Folder) -> FederationReport:
        from shoestring.federated.fold import federation_report

        return federation_report(request.asked, history, folder)


FEDERATED = FederatedPlugin()
