"""The plan of a run that goes on, read back from its folder: the same techniques, and devices put together as they were.

Anybody can write such a file. A plan that could not have been made for what is asked for is refused: without it a plan
without noise would be played under an epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from shoestring.core.codec import Unreadable
from shoestring.core.errors import Mistake
from shoestring.core.technique import in_order
from shoestring.federated.available import AvailableTechniques
from shoestring.federated.catalogue import clash, incomplete_reason
from shoestring.federated.quantities import FEDERATED
from shoestring.federated.room import ERROR, FederatedPlan, FederationDetails
from shoestring.federated.simulation.cohort.method_choice import DEVICES, WORDS
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.release import noise_of
from shoestring.planning.plan import named, read_plan


def plan_in(
    file: Mapping[str, Any], offers: AvailableTechniques, use: Sequence[str] | None = None, private: bool = False
) -> FederatedPlan:
    """The plan that a file holds. Raises Unreadable where it holds none, or none for techniques of these words (`use`)
    or, if it is to be `private`, none with noise."""
    try:
        plan = read_plan(file, offers.restore, (*FEDERATED, ERROR), FederationDetails)
    except Mistake as error:  # the folder's, not the user's
        raise Unreadable(str(error)) from error
    if reason := unlike(plan.techniques, None if use is None else in_order(map(offers.parse, use)), private):
        raise Unreadable(reason)
    how = plan.details.how
    if how.kind not in WORDS or not 1 <= how.chunk <= DEVICES:
        raise Unreadable(f"devices can't work {how.kind}, {how.chunk} at once")
    return plan


def unlike(techniques: Sequence[FederatedTechnique], wanted: Sequence[FederatedTechnique] | None, private: bool) -> str:
    """Why a kept plan's techniques can't be those of what is asked for; empty if they can."""
    if wanted is not None and tuple(techniques) != tuple(wanted):
        return f"its techniques are {named(techniques)}, and {named(wanted)} was asked for"
    if private and noise_of(techniques) is None:
        return "it has no noise, and an epsilon is asked for"
    clashes = (clash(one, other) for one, other in combinations(techniques, 2))
    return next(filter(None, clashes), "") or incomplete_reason(techniques)
