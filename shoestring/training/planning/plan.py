"""The details of a training plan, and plan files named by a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.files.codec import Unreadable
from shoestring.core.files.regular import read_regular
from shoestring.core.files.seal import Damaged, unseal
from shoestring.core.technique import parse_technique, technique_from, text
from shoestring.core.workers.staging import RankFigures, Staging
from shoestring.core.workers.sum_costs import Speeds
from shoestring.data.lengths import Lengths
from shoestring.planning.plan import Outcome, Plan, read_plan
from shoestring.planning.quantities import QUANTITIES
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.technique import TrainingTechnique as Technique

SAVE = "save one with: shoestring plan JOB --memory 2GiB --save {}"


class ProcessBasis(Enum):
    """How a plan's process size is known."""

    ESTIMATED = auto()  # estimated, because it can't be tried here
    ANCHOR = auto()  # from the measured real step
    TRIAL = auto()  # partly from a trial of some real steps


@dataclass(frozen=True)
class TrainingDetails:
    world: int = 1  # workers that train together; the figures are those of the largest
    where: str = ""  # the moment of the tensors' peak
    parts: Mapping[str, int] = field(default_factory=dict)  # bytes at the peak, by what holds them
    disk_speed: float = 0.0  # measured bytes per second for the plan's disk traffic; 0: no traffic
    looked: bool = (
        True  # False: shoestring could not inspect the model, so it is plain training with hardly any prediction
    )
    mesh: Mapping[str, int] = field(default_factory=dict)  # of a group: workers along data, stage and tensor
    process_basis: ProcessBasis = field(default=ProcessBasis.ESTIMATED, compare=False)
    staging: Staging | None = field(default=None, compare=False)  # of a model cut across workers
    ranks: tuple[RankFigures, ...] = field(default=(), compare=False)  # of a group; only for chosen plans
    blocks: tuple[tuple[str, int], ...] = field(default=(), compare=False)  # peak bytes while each block runs
    lengths: Lengths = field(default_factory=Lengths, compare=False)  # the batch sizes that it was made for
    speeds: Speeds | None = field(default=None, compare=False)  # of links, by which all-reduce algorithms are chosen


TrainingPlan = Plan[Technique, TrainingDetails]
TrainingOutcome = Outcome[TrainingPlan]


def training_plan(
    techniques: tuple[Technique, ...] = (),
    exactness: Exactness = Exactness.BITS,
    details: TrainingDetails = TrainingDetails(),
    basis: str = "",
    **figures: float,
) -> TrainingPlan:
    """A plan; figures that are not given are zero."""
    return Plan(techniques, exactness, {one.name: 0 for one in QUANTITIES} | figures, details, basis)


def technique_in(name: str, knobs: Mapping[str, Any]) -> Technique:
    return technique_from(name, knobs, CATALOGUE)


def plan_in(file: Mapping[str, Any]) -> TrainingPlan:
    """The plan in a file. Raises Unreadable or Mistake if there is none."""
    plan = read_plan(file, technique_in, QUANTITIES, TrainingDetails)
    return plan.predicting(**{one.name: 0 for one in QUANTITIES if one.name not in plan.predicted})


def check_paths(techniques: Iterable[Technique], given: Iterable[str | Technique], where: object) -> None:
    """Refuse a folder named by techniques in a file, unless the user wrote the same technique."""
    own = {one if isinstance(one, Technique) else parse_technique(one, CATALOGUE) for one in given}
    for technique in techniques:
        named_folders = [knob for knob in technique.folders if vars(technique)[knob]]
        if named_folders and technique not in own:
            raise Mistake(
                f"{where} has {text(technique)}. No folder that a file names is written to: give the techniques yourself, with "
                f'--use "{text(technique)}", if that is right'
            )


def load_plan(path: Path) -> TrainingPlan:
    """The plan in a file named by the user. Plans stored by a run are sealed, so damage is noticed."""
    try:
        data, _ = unseal(read_regular(path), ours=False)
        plan = plan_in(data)
    except Damaged as error:
        raise Mistake(
            f"{path} is not a plan as it was saved ({error}): {SAVE.format(path)}; if you changed it yourself, remove its line "
            f'"sha256"'
        ) from error
    except OSError as error:
        raise Mistake(f"{path} can't be read ({error.strerror}): {SAVE.format(path)}") from error
    except (Unreadable, Mistake) as error:
        raise Mistake(f"{path} is not a plan that can be read: {error}; {SAVE.format(path)}") from error
    check_paths(plan.techniques, (), path)
    return plan
