"""The part of a run's plan that its report shows, read from plan.json, or from report.json if the run is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoestring.core.exactness import Exactness, stated_in
from shoestring.core.figures import Quantity
from shoestring.core.files.codec import Unreadable, finite_json, from_json, to_json
from shoestring.core.workers.staging import RankFigures, Staging
from shoestring.planning.quantities import MEASURABLE
from shoestring.planning.spelling import technique_text

PlanFigures = Mapping[str, float | None]  # by name; None: unknown


@dataclass(frozen=True)
class UsedTechnique:
    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""  # why it was chosen

    @property
    def text(self) -> str:
        """As written in `--use`."""
        return technique_text({"name": self.name, "knobs": self.knobs})


@dataclass(frozen=True)
class LostPlan:
    """A plan that lost."""

    text: str = ""  # as written in `--use`; empty: plain
    lost: str = ""  # why it lost
    predicted: PlanFigures = field(default_factory=dict)


@dataclass(frozen=True)
class CutPlan:
    """Where a model is cut across workers, and their timeline."""

    mesh: Mapping[str, int]  # number of workers along each axis
    staging: Staging
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
    blocks: tuple[tuple[str, float], ...] = ()  # (block, peak bytes while it runs), in order
    exactness: Exactness | None = None
    basis: str = ""  # where the predictions come from
    mesh: Mapping[str, int] = field(default_factory=dict)  # of a group
    cut: CutPlan | None = None  # of a model cut across workers

    def as_json(self) -> dict[str, Any]:
        """Its JSON in a report; the cut is written by report_json.py."""
        if self.techniques is None:
            return {}
        return {
            "predicted": dict(self.predicted),
            "techniques": to_json(self.techniques),
            "exactness": self.exactness.word if self.exactness is not None else None,
            "basis": self.basis,
            "blocks": to_json(self.blocks),
            "plain": dict(self.plain),
            "runners_up": to_json(self.runners_up),
        }


def read_summary(
    file: Mapping[str, Any], ended: Mapping[str, Any] | None = None, quantities: tuple[Quantity, ...] = MEASURABLE
) -> PlanSummary:
    """The plan in a run's plan.json; a finished run's report takes precedence.

    Raises Unreadable if a value is impossible."""
    chosen, found = file.get("chosen"), dict[str, Any]()
    if isinstance(chosen, Mapping):
        details = chosen["details"] if isinstance(chosen.get("details"), Mapping) else {}
        found = {name: chosen[name] for name in ("techniques", "basis", "exactness") if name in chosen}
        found |= {name: details[name] for name in ("blocks", "mesh") if name in details}
        found |= {"predicted": chosen, "plain": file.get("plain", {}), "runners_up": file.get("runners_up", ())}
        if details.get("mesh") and details.get("staging"):
            found["cut"] = {name: details[name] for name in ("mesh", "staging", "ranks") if name in details}
    known = ("techniques", "basis", "exactness", "blocks", "predicted", "plain", "runners_up")
    found |= {name: ended[name] for name in known if ended and name in ended}
    found |= {name: figures_in(found[name], quantities) for name in ("predicted", "plain") if name in found}
    found["runners_up"] = lost_plans(found.get("runners_up", ()), quantities)
    level = stated_in({"exactness": found.pop("exactness", None)})
    return replace(from_json(PlanSummary, finite_json(found), unknown="ignored"), exactness=level)


def lost_plans(found: Any, quantities: tuple[Quantity, ...]) -> Any:
    """The losing plans of an outcome as `LostPlan` expects them: figures grouped, instead of beside the other entries."""
    if not isinstance(found, list):
        return found
    return [
        {**one, "predicted": figures_in(one.get("predicted", one), quantities)} if isinstance(one, Mapping) else one
        for one in found
    ]


def figures_in(found: Any, quantities: tuple[Quantity, ...]) -> Any:
    """The entries of a plan's JSON that are figures."""
    return {one.name: found[one.name] for one in quantities if one.name in found} if isinstance(found, Mapping) else {}
