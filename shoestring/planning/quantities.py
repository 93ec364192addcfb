"""What is predicted of a plan where its room lists nothing else, and what a run's plan.json tells.

Nothing heavy is imported: pages need it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoestring.core.figures import Figures, Quantity, figures

STEP_SECONDS = Quantity("step_seconds", "a step", "seconds")
# Each is a field of the same name of `Plan` and of its JSON.
MEASURABLE = (
    Quantity("peak_bytes", "tensors", counted=True),
    Quantity("process_bytes", "process"),
    STEP_SECONDS,
    Quantity("traffic_bytes", "disk, a step", counted=True, optional=True),
    Quantity("sent_bytes", "sent, a step", counted=True, optional=True),
    Quantity("sent_by_others_bytes", "sent by others, a step of theirs", counted=True, optional=True),
    Quantity("validation_seconds", "a validation", "seconds", optional=True),
)
NEVER_ZERO = frozenset(one.name for one in MEASURABLE if not one.optional)  # of these, 0 means that nothing is known
QUANTITIES = (  # the others are not measured in a run
    *MEASURABLE,
    Quantity("training_seconds", "all steps and validations", "seconds", optional=True),
    Quantity("stored_bytes", "on disk", optional=True),
    Quantity("flops", "operations, a step", "operations", optional=True),
    Quantity("drift", "drift, stated", "share", optional=True),
)


def compared(
    predicted: Mapping[str, Any],
    measured: Mapping[str, Any],
    basis: str = "",
    quantities: tuple[Quantity, ...] = MEASURABLE,
) -> Figures:
    """What was predicted of a plan beside what was measured, both by name; `basis`: how the predictions are known."""
    known = {name: number for name, number in predicted.items() if number or name not in NEVER_ZERO}
    return figures(quantities, known, basis).measured(measured)


CUT = ("mesh", "ranks", "cut", "cut_blocks", "cut_why", "schedule", "pieces")
VERSION = 2  # of a run's plan.json; the first one held the chosen plan twice


def plan_summary(file: Mapping[str, Any], quantities: tuple[Quantity, ...] = MEASURABLE) -> dict[str, Any]:
    """What a run's plan.json, of any version, tells its page and its report; what is missing there is missing here.

    predicted                 what may be measured too, by name
    techniques                name, knobs and why of each
    exactness, sure, blocks   of the chosen plan (`exact` in plans before 0.1)
    plain, runners_up         other plans; those that lost with `lost`, why, and `text`, how they are written
    mesh, ranks               of a group: how many workers stand along each axis; what every kind of them needs
    cut, cut_blocks, cut_why, schedule, pieces    of a model that is cut: blocks of every chunk, their names, why there; who does what
    bubble, timeline          {"predicted": share of a step in which workers wait}, {"predicted": what each does when}
    """
    chosen = file.get("chosen")
    once: dict[str, Any] = {}
    if isinstance(chosen, Mapping):
        once["predicted"] = {one.name: chosen[one.name] for one in quantities if one.name in chosen}
        level = "exactness" if "exactness" in chosen else "exact"
        told = ("techniques", level, "sure", "blocks", *(CUT if chosen.get("mesh") else ()))
        once |= {name: chosen[name] for name in told if name in chosen}
        once |= {name: {"predicted": chosen[name]} for name in ("bubble", "timeline") if name in chosen}
    beside = ("predicted", "techniques", "exactness", "exact", "sure", "blocks", "plain", "runners_up")
    return once | {name: file[name] for name in beside if name in file}
