"""The stored plan of a resumed run: the same techniques, with devices simulated in the same way.

Anybody can write such a file. A plan that can't be the answer to the request is refused; otherwise a plan without noise
could be executed although an epsilon was requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Unreadable
from shoestring.core.technique import in_order
from shoestring.federated.catalogue import clash, incomplete_reason
from shoestring.federated.planning.available import AvailableTechniques
from shoestring.federated.quantities import FEDERATED
from shoestring.federated.room import ERROR, FederatedPlan, FederationDetails
from shoestring.federated.simulation.cohort.method_choice import DEVICES, WORDS
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.release import noise_of
from shoestring.planning.plan import read_plan, techniques_text


def plan_in(
    file: Mapping[str, Any], offers: AvailableTechniques, use: Sequence[str] | None = None, private: bool = False
) -> FederatedPlan:
    """The plan in a file. Raises Unreadable if there is none, if its techniques are not those of `use`, or if it should
    be `private` and has no noise."""
    try:
        plan = read_plan(file, offers.restore, (*FEDERATED, ERROR), FederationDetails)
    except Mistake as error:  # the folder's mistake, not the user's
        raise Unreadable(str(error)) from error
    if reason := unlike(plan.techniques, None if use is None else in_order(map(offers.parse, use)), private):
        raise Unreadable(reason)
    how = plan.details.how
    if how.kind not in WORDS or not 1 <= how.chunk <= DEVICES:
        raise Unreadable(f"devices can't work {how.kind}, {how.chunk} at once")
    return plan


def unlike(techniques: Sequence[FederatedTechnique], wanted: Sequence[FederatedTechnique] | None, private: bool) -> str:
    """Why a stored plan's techniques do not match the request; empty if they do."""
    if wanted is not None and tuple(techniques) != tuple(wanted):
        return f"its techniques are {techniques_text(techniques)}, and {techniques_text(wanted)} was asked for"
    if private and noise_of(techniques) is None:
        return "it has no noise, and an epsilon is asked for"
    clashes = (clash(one, other) for one, other in combinations(techniques, 2))
    return next(filter(None, clashes), "") or incomplete_reason(techniques)
