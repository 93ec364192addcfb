"""What is told of a run's plan: read once, by the codec, from plan.json and from the report of a run that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoestring.core.codec import Unreadable, finite_json, from_json
from shoestring.core.exactness import Exactness, stated_in
from shoestring.core.figures import Quantity
from shoestring.core.staging import Timeline
from shoestring.planning.quantities import MEASURABLE, plan_summary
from shoestring.planning.spelling import technique_text

PlanFigures = Mapping[str, float | None]  # by name; None: not known


@dataclass(frozen=True)
class UsedTechnique:
    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""  # it is there

    @property
    def text(self) -> str:
        """As one would write it."""
        return technique_text({"name": self.name, "knobs": self.knobs})


@dataclass(frozen=True)
class LostPlan:
    """A plan that was not taken."""

    text: str = ""  # as one would write it; empty: plain
    lost: str = ""  # why
    predicted: PlanFigures = field(default_factory=dict)


@dataclass(frozen=True)
class RankFigures:
    """What some of the workers were predicted to need, who all do the same."""

    ranks: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True)
class CutPlan:
    """Where a model is cut across workers, and who does what when."""

    mesh: Mapping[str, int]  # how many workers stand along each axis
    cut: tuple[int, ...]  # blocks of every chunk, in order: as many chunks as stages, or a multiple of that
    schedule: str
    pieces: int  # of a batch
    cut_blocks: tuple[tuple[str, ...], ...] = ()  # their names
    cut_why: str = ""
    bubble: float | None = None  # share of a step in which workers wait
    timeline: Timeline = ()
    ranks: tuple[RankFigures, ...] = ()

    def __post_init__(self) -> None:
        if "stage" not in self.mesh or min(self.mesh.values()) < 1:
            raise Unreadable(f"the mesh is {dict(self.mesh)}: every axis has a worker at least, and there are stages")


@dataclass(frozen=True)
class PlanSummary:
    techniques: tuple[UsedTechnique, ...] | None = None  # None: nothing is planned yet
    predicted: PlanFigures = field(default_factory=dict)
    plain: PlanFigures = field(default_factory=dict)  # of the plan without techniques
    runners_up: tuple[LostPlan, ...] = ()
    blocks: tuple[tuple[str, float], ...] = ()  # the highest bytes while each runs, in order
    exactness: Exactness | None = None
    sure: str = ""  # how the predictions are known
    mesh: Mapping[str, int] = field(default_factory=dict)  # of a group
    cut: CutPlan | None = None  # of a model that is cut


def read_plan(
    file: Mapping[str, Any], ended: Mapping[str, Any] | None = None, quantities: tuple[Quantity, ...] = MEASURABLE
) -> PlanSummary:
    """The plan that a run's plan.json tells of; what the report of a finished run says of it counts before that.

    Raises Unreadable where something is not what it must be."""
    chosen = file.get("chosen")
    whole = {**plan_summary(file, quantities), **(ended or {})}
    told: dict[str, Any] = {name: whole[name] for name in ("techniques", "blocks", "sure", "mesh") if name in whole}
    told |= {name: figures_in(whole[name], quantities) for name in ("predicted", "plain") if name in whole}
    told["runners_up"] = lost_plans(whole.get("runners_up", ()), quantities)
    if isinstance(chosen, Mapping) and chosen.get("mesh") and "cut" in chosen:
        told["cut"] = chosen
    return replace(from_json(PlanSummary, finite_json(told), unknown="ignored"), exactness=stated_in(whole))


def lost_plans(found: Any, quantities: tuple[Quantity, ...]) -> Any:
    """The plans of an outcome, which have their figures beside all else, as `LostPlan` has them."""
    if not isinstance(found, list):
        return found
    return [{**one, "predicted": figures_in(one, quantities)} if isinstance(one, Mapping) else one for one in found]


def figures_in(found: Any, quantities: tuple[Quantity, ...]) -> Any:
    """Those of its entries that are figures of a run."""
    return {one.name: found[one.name] for one in quantities if one.name in found} if isinstance(found, Mapping) else {}
