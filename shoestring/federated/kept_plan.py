"""The plan of a run that goes on, read back from its folder: the same techniques, and devices put together as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.codec import Unreadable, from_json
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in
from shoestring.federated.available import AvailableTechniques
from shoestring.federated.quantities import FEDERATED
from shoestring.federated.room import FederatedPlan
from shoestring.federated.simulation.cohort import MethodChoice


@dataclass(frozen=True)
class KeptFederatedPlan:
    plan: FederatedPlan
    how: MethodChoice


def plan_in(file: Mapping[str, Any], offers: AvailableTechniques) -> KeptFederatedPlan:
    """The plan that a file holds. Raises Unreadable, or as Python does, where it holds none."""
    chosen, how = file["chosen"], {name: value for name, value in file["how"].items() if name != "processes"}
    try:
        techniques = tuple(offers.restore(one["name"], one["knobs"]) for one in chosen["techniques"])
    except Mistake as error:  # the folder's, not the user's
        raise Unreadable(str(error)) from error
    known = {one.name: chosen[one.name] for one in FEDERATED if chosen.get(one.name) is not None}
    return KeptFederatedPlan(
        FederatedPlan(techniques, stated_in(chosen) or Exactness.CHANGED, known), from_json(MethodChoice, how)
    )
