"""The plan of a run that goes on, read back from its folder: the same techniques, and devices put together as they were.

Anybody can write such a file. A plan that could not have been made for what is asked for is refused: without it a plan
without noise would be played under an epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from shoestring.core.codec import Unreadable, from_json
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in
from shoestring.core.technique import in_order
from shoestring.federated.available import AvailableTechniques
from shoestring.federated.catalogue import clash, incomplete_reason
from shoestring.federated.quantities import FEDERATED
from shoestring.federated.room import FederatedPlan
from shoestring.federated.simulation.cohort import MethodChoice
from shoestring.federated.simulation.cohort.method_choice import DEVICES, WORDS
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.release import noise_of
from shoestring.planning.room import named


@dataclass(frozen=True)
class KeptFederatedPlan:
    plan: FederatedPlan
    how: MethodChoice


def plan_in(
    file: Mapping[str, Any], offers: AvailableTechniques, use: Sequence[str] | None = None, private: bool = False
) -> KeptFederatedPlan:
    """The plan that a file holds. Raises Unreadable, or as Python does, where it holds none, or none for techniques of
    these words (`use`) or, if it is to be `private`, none with noise."""
    chosen, how = file["chosen"], {name: value for name, value in file["how"].items() if name != "processes"}
    try:
        techniques = tuple(offers.restore(one["name"], one["knobs"]) for one in chosen["techniques"])
    except Mistake as error:  # the folder's, not the user's
        raise Unreadable(str(error)) from error
    if reason := unlike(techniques, None if use is None else in_order(map(offers.parse, use)), private):
        raise Unreadable(reason)
    method = from_json(MethodChoice, how)
    if method.kind not in WORDS or not 1 <= method.chunk <= DEVICES:
        raise Unreadable(f"devices can't work {method.kind}, {method.chunk} at once")
    known = {one.name: chosen[one.name] for one in FEDERATED if chosen.get(one.name) is not None}
    return KeptFederatedPlan(FederatedPlan(techniques, stated_in(chosen) or Exactness.CHANGED, known), method)


def unlike(techniques: Sequence[FederatedTechnique], wanted: Sequence[FederatedTechnique] | None, private: bool) -> str:
    """Why a kept plan's techniques can't be those of what is asked for; empty if they can."""
    if wanted is not None and tuple(techniques) != tuple(wanted):
        return f"its techniques are {named(techniques)}, and {named(wanted)} was asked for"
    if private and noise_of(techniques) is None:
        return "it has no noise, and an epsilon is asked for"
    clashes = (clash(one, other) for one, other in combinations(techniques, 2))
    return next(filter(None, clashes), "") or incomplete_reason(techniques)
