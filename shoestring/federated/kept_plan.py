"""The plan of a run that goes on, read back from its folder: the same techniques, and devices put together as they were."""

from __future__ import annotations

from dataclasses import dataclass

from shoestring.core.codec import Unreadable, from_json
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in
from shoestring.federated.available import AvailableTechniques
from shoestring.federated.room import FederatedPlan
from shoestring.federated.simulation.cohort import MethodChoice
from shoestring.planning.quantities import FEDERATED
from shoestring.runs.folder import Folder


@dataclass(frozen=True)
class KeptFederatedPlan:
    plan: FederatedPlan
    how: MethodChoice


def kept_plan(folder: Folder, offers: AvailableTechniques) -> KeptFederatedPlan | None:
    """None where the run has no plan yet."""
    file = folder.read("plan.json")
    if not file:
        return None
    try:
        chosen, how = file["chosen"], {name: value for name, value in file["how"].items() if name != "processes"}
        techniques = tuple(offers.restore(one["name"], one["knobs"]) for one in chosen["techniques"])
        known = {one.name: chosen[one.name] for one in FEDERATED if chosen.get(one.name) is not None}
        return KeptFederatedPlan(
            FederatedPlan(techniques, stated_in(chosen) or Exactness.CHANGED, known), from_json(MethodChoice, how)
        )
    except (KeyError, TypeError, AttributeError, Unreadable, Mistake) as error:
        raise folder.unusable("plan.json", error) from error
