"""A plan: an ordered tuple of techniques and the figures they lead to. Saves as JSON and replays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from shoestring.core.codec import from_json, hints_of, make_value, to_json
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in
from shoestring.core.figures import Figures, figures
from shoestring.core.files import write_whole
from shoestring.core.job import Job
from shoestring.core.regular import read_regular
from shoestring.core.seal import Damaged, unsealed
from shoestring.core.staging import Staging, Work
from shoestring.core.sums import Speeds
from shoestring.core.technique import built, described, in_order, parsed, text
from shoestring.data.lengths import Lengths
from shoestring.planning.quantities import QUANTITIES, VERSION
from shoestring.planning.room import named
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.technique import TrainingTechnique as Technique

LARGEST = 1 << 62  # no figure is as large


@dataclass(frozen=True)
class RankFigures:
    """What is predicted of some workers of a group, which are alike."""

    ranks: tuple[int, ...]
    peak_bytes: int
    sent_bytes: float  # per step


class ProcessBasis(Enum):
    """How the size of a plan's process is known."""

    ESTIMATED = auto()  # it can't be tried here
    ANCHOR = auto()  # from the real step that was measured
    TRIAL = auto()  # a trial of some real steps is part of it


@dataclass(frozen=True)
class Plan:
    """Techniques in their order, and the figures that are predicted of training with them. `save` writes it to a file, and
    `shoestring train --plan FILE` replays it."""

    techniques: tuple[Technique, ...] = ()
    peak_bytes: int = 0  # of tensors, the highest of the first two steps
    process_bytes: int = 0  # of the whole process
    step_seconds: float = 0.0
    exactness: Exactness = Exactness.BITS  # how close its weights are to those of plain training
    flops: float = 0.0  # operations of a step
    traffic_bytes: float = 0.0  # to and from disk per step
    sent_bytes: float = 0.0  # that a worker sends to others per step; of a server, at most
    world: int = 1  # workers that train together; the figures are those of the largest
    where: str = ""  # the moment of the peak
    parts: tuple[tuple[str, int], ...] = ()  # what the peak is made of
    sure: str = ""  # how these figures were found, in words;
    process_basis: ProcessBasis = field(
        default=ProcessBasis.ESTIMATED, compare=False
    )  # and that of the process, while it is planned
    stored_bytes: int = 0  # of state, that stay on the disk
    disk_speed: float = 0.0  # bytes per second, measured, at which the traffic passes; 0: there is none
    sent_by_others_bytes: float = (
        0.0  # that each worker but the first, which is a server, sends per step of its own; 0: the same
    )
    drift: float = (
        0.0  # how far its techniques may lead, as they state (training/technique.py); infinite: one states nothing
    )
    validation_seconds: float = 0.0  # of one validation; 0: the job has none
    training_seconds: float = (
        0.0  # of all steps and validations; 0: nobody knows how many there are, or there is no validation
    )
    mesh: tuple[tuple[str, int], ...] = ()  # of a group: how many workers stand along data, stage and tensor
    staging: Staging | None = field(
        default=None, compare=False
    )  # of a model that is cut: where, and who does what when
    ranks: tuple[RankFigures, ...] = field(
        default=(), compare=False
    )  # of a group, every kind of worker; of chosen plans only
    blocks: tuple[tuple[str, int], ...] = field(default=(), compare=False)  # highest bytes while each block runs
    lengths: Lengths = field(default_factory=Lengths, compare=False)  # the sizes of batches that it is made for
    speeds: Speeds | None = field(default=None, compare=False)  # of links, by which workers choose how to add up
    looked: bool = (
        True  # False: shoestring could not look at the model; plain training, not tracked, with hardly a figure
    )
    warnings: tuple[str, ...] = field(default=(), compare=False)  # what the user should know before it is used
    job: Job | None = field(
        default=None, compare=False, repr=False
    )  # that it was made for, in this process; None: nobody knows

    def __str__(self) -> str:
        return named(self.techniques)

    def numbers(self) -> dict[str, float]:
        """All that is predicted, by name."""
        return {one.name: vars(self)[one.name] for one in QUANTITIES} | {"world": self.world}

    @property
    def figures(self) -> Figures:
        return figures(QUANTITIES, self.numbers(), basis=self.sure)

    def as_json(self) -> dict[str, Any]:
        return (
            {
                "techniques": [described(technique) for technique in self.techniques],
                "peak_bytes": self.peak_bytes,
                "process_bytes": self.process_bytes,
                "step_seconds": self.step_seconds,
                "exactness": self.exactness.word,
                "exact": self.exactness <= Exactness.ROUNDING,
                "flops": self.flops,
                "traffic_bytes": self.traffic_bytes,
                "disk_bytes_per_second": self.disk_speed,
                "stored_bytes": self.stored_bytes,
                "sent_bytes": self.sent_bytes,
                "sent_by_others_bytes": self.sent_by_others_bytes,
                "world": self.world,
                "where": self.where,
                "parts": dict(self.parts),
                "sure": self.sure,
                "warnings": list(self.warnings),
            }
            | {name: seconds for name in ("validation_seconds", "training_seconds") if (seconds := vars(self)[name])}
            | ({} if self.looked else {"looked": False})
            | self.axes()
        )

    def axes(self) -> dict[str, Any]:
        """How workers stand, and where the model is cut; nothing of a plan for one worker."""
        found: dict[str, Any] = {"mesh": dict(self.mesh)} if self.mesh else {}
        if (cut := self.staging) is not None:
            found |= {
                "cut": list(cut.cut),
                "cut_blocks": [list(names) for names in cut.blocks],
                "schedule": cut.schedule,
                "pieces": cut.pieces,
                "bubble": cut.bubble,
                "cut_why": cut.why,
            }
        return found

    def drawn(self) -> dict[str, Any]:
        """What a picture of a plan for a group needs beside that: who does what when, and what every kind of worker needs."""
        found: dict[str, Any] = {
            "ranks": [
                {"ranks": list(one.ranks), "peak_bytes": one.peak_bytes, "sent_bytes": one.sent_bytes}
                for one in self.ranks
            ]
        }
        return found | (
            {}
            if self.staging is None
            else {"timeline": [[list(work) for work in own] for own in self.staging.timeline]}
        )

    def as_file(self) -> dict[str, Any]:
        """The same with what only a run's own file has."""
        return self.as_json() | {
            "techniques": [described(technique) | {"why": technique.why} for technique in self.techniques],
            "drift": self.drift if math.isfinite(self.drift) else None,
            "blocks": [list(one) for one in self.blocks],
            "lengths": to_json(self.lengths),
            **self.speeds_as_json(),
            **self.drawn(),
        }

    def speeds_as_json(self) -> dict[str, Any]:
        return {} if self.speeds is None else {"speeds": to_json(self.speeds)}

    def save(self, path: Path) -> None:
        chosen = self.as_json() | {"lengths": to_json(self.lengths)} | self.speeds_as_json()
        write_whole(path, json.dumps({"shoestring": 1, "chosen": chosen}, indent=1).encode(), asked=True)


def techniques_in(data: Any) -> tuple[Technique, ...]:
    """Techniques from their JSON."""
    return in_order(built(one["name"], one["knobs"], CATALOGUE) for one in data)


def check_paths(techniques: Iterable[Technique], given: Iterable[str | Technique], where: object) -> None:
    """Refuse a folder that techniques from a file name, unless the user wrote the same technique."""
    own = {one if isinstance(one, Technique) else parsed(one, CATALOGUE) for one in given}
    for technique in techniques:
        named_folders = [knob for knob in technique.folders if vars(technique)[knob]]
        if named_folders and technique not in own:
            raise Mistake(
                f"{where} has {text(technique)}. No folder that a file names is written to: give the techniques yourself, with "
                f'--use "{text(technique)}", if that is right'
            )


def load_plan(path: Path) -> Plan:
    """The plan in a file that a user gave; one that a run keeps is sealed, and damage to it is found."""
    try:
        data, _ = unsealed(read_regular(path), ours=False)
    except Damaged as error:
        raise Mistake(
            f"{path} is not a plan as it was saved ({error}): {SAVE.format(path)}; if you changed it yourself, remove its line "
            f'"sha256"'
        ) from error
    except OSError as error:
        raise Mistake(f"{path} can't be read ({error.strerror}): {SAVE.format(path)}") from error
    plan = plan_in(data, path)
    check_paths(plan.techniques, (), path)
    return plan


def staging_in(chosen: Mapping[str, Any]) -> Staging | None:
    """Where a plan's model is cut; None of one that is not."""
    if "cut" not in chosen:
        return None
    timeline = tuple(tuple(Work(*work) for work in own) for own in chosen.get("timeline", ()))
    names = tuple(name for own in chosen.get("cut_blocks", ()) for name in own)
    return Staging(
        tuple(chosen["cut"]),
        chosen["schedule"],
        chosen["pieces"],
        chosen["bubble"],
        timeline,
        why=chosen.get("cut_why", ""),
        names=names,
    )


SAVE = "save one with: shoestring plan JOB --memory 2GiB --save {}"


def plan_in(data: Mapping[str, Any], path: Path) -> Plan:
    """The plan that a file holds, of this version or one before: until 2, `blocks` stood beside the plan and not in it."""
    try:
        if (version := data.get("shoestring", 1)) > VERSION:
            raise Mistake(f"{path} is of version {version}, and this shoestring reads up to {VERSION}: use a newer one")
        chosen = data.get("chosen", data)
        stated = stated_in(chosen)
        if stated is None:
            raise KeyError("exactness")
        drift = chosen.get("drift", 0.0)
        plan = Plan(
            techniques_in(chosen["techniques"]),
            chosen["peak_bytes"],
            chosen["process_bytes"],
            chosen["step_seconds"],
            stated,
            flops=chosen.get("flops", 0.0),
            traffic_bytes=chosen.get("traffic_bytes", 0.0),
            where=chosen.get("where", ""),
            parts=tuple(chosen.get("parts", {}).items()),
            sure=chosen.get("sure", ""),
            sent_bytes=chosen.get("sent_bytes", 0.0),
            warnings=tuple(chosen.get("warnings", ())),
            disk_speed=chosen.get("disk_bytes_per_second", 0.0),
            world=chosen.get("world", 1),
            stored_bytes=chosen.get("stored_bytes", 0),
            sent_by_others_bytes=chosen.get("sent_by_others_bytes", 0.0),
            drift=math.inf if drift is None else drift,
            validation_seconds=chosen.get("validation_seconds", 0.0),
            training_seconds=chosen.get("training_seconds", 0.0),
            blocks=tuple((name, size) for name, size in chosen.get("blocks", data.get("blocks", ()))),
            ranks=tuple(
                RankFigures(tuple(one["ranks"]), one["peak_bytes"], one["sent_bytes"])
                for one in chosen.get("ranks", ())
            ),
            lengths=from_json(Lengths, chosen.get("lengths", {})),
            mesh=tuple(chosen.get("mesh", {}).items()),
            staging=staging_in(chosen),
            speeds=from_json(Speeds, chosen["speeds"]) if "speeds" in chosen else None,
            looked=chosen.get("looked", True) is not False,
        )
        check_values(plan)
        return plan
    except Mistake:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        said = str(error)[:200]
        raise Mistake(
            f"{path} is not a plan that can be read ({type(error).__name__}: {said}); {SAVE.format(path)}"
        ) from error


def check_values(plan: Plan) -> None:
    """Refuse values of another type than a plan has, and figures that nothing can be."""
    for name, value in plan.numbers().items():
        if value is not None and (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not (0 <= value < LARGEST or (name == "drift" and value == math.inf))
        ):  # nobody knows how far
            raise ValueError(f"{name} is {str(value)[:40]}")
    hints = hints_of(Plan)
    for name in ("where", "parts", "sure", "warnings", "mesh", "ranks", "blocks", "drift"):
        make_value(hints[name], to_json(vars(plan)[name]), False, name)
    if plan.staging is not None:
        from_json(Staging, to_json(plan.staging))
