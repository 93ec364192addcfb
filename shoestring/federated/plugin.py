"""What federated runs bring to the code that all rooms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.rooms import RoomPlugin

if TYPE_CHECKING:
    from shoestring.core.figures import Quantity
    from shoestring.runs.event import Event
    from shoestring.runs.folder import Folder
    from shoestring.runs.history import History
    from shoestring.runs.request import Request
    from shoestring.show.page.room_page import RoomPage

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

    def page(self) -> RoomPage:
        from shoestring.federated.page import FederatedPage

        return FederatedPage(self)

    def entries(self, request: Request, history: History, folder: Folder) -> Mapping[str, Any]:
        from shoestring.federated.events import RoundFinished
        from shoestring.federated.fold import comparisons_in, federation

        found: dict[str, Any] = {"federated": federation(request.asked, history.of_kind(RoundFinished))}
        return found | ({"comparisons": told} if (told := comparisons_in(folder)) else {})


FEDERATED = FederatedPlugin()
