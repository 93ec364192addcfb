"""The quantities that a plan predicts and a run measures, for rooms that list none of their own.

Imports nothing heavy, because pages need it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoestring.core.figures import Figures, Quantity, figures
from shoestring.measure.load import HELD_UP

STEP_SECONDS = Quantity("step_seconds", "a step", "seconds")
MEASURABLE = (
    Quantity("peak_bytes", "tensors", counted=True),
    Quantity("process_bytes", "process"),
    STEP_SECONDS,
    Quantity("traffic_bytes", "disk, a step", counted=True, optional=True),
    Quantity("sent_bytes", "sent, a step", counted=True, optional=True),
    Quantity("sent_by_others_bytes", "sent by others, a step of theirs", counted=True, optional=True),
    Quantity("validation_seconds", "a validation", "seconds", optional=True),
)
HELD_UP_SHARE = "held_up"  # beside what was measured: fraction of the time that the steps waited for a core
NEVER_ZERO = frozenset(one.name for one in MEASURABLE if not one.optional)  # for these, 0 means unknown
QUANTITIES = (  # the others are not measured in a run
    *MEASURABLE,
    Quantity("training_seconds", "all steps and validations", "seconds", optional=True),
    Quantity("stored_bytes", "on disk", optional=True),
    Quantity("flops", "operations, a step", "operations", optional=True),
    Quantity("drift", "drift, stated", "share", optional=True),
)


def compare_figures(
    predicted: Mapping[str, Any],
    measured: Mapping[str, Any],
    basis: str = "",
    quantities: tuple[Quantity, ...] = MEASURABLE,
) -> Figures:
    """Predicted and measured values by name, as figures; `basis`: where the predictions come from."""
    known = {name: number for name, number in predicted.items() if number or name not in NEVER_ZERO}
    found = figures(quantities, known, basis).with_measured(measured)
    return found.with_remark(STEP_SECONDS.name, remark) if (remark := load_remark(measured)) else found


def load_remark(measured: Mapping[str, Any]) -> str:
    """Why the measured time of a step is not the step's own; empty if other processes hardly slowed it down.

    >>> load_remark({"held_up": 0.92}), load_remark({"held_up": 0.02}), load_remark({})
    ('measured while other processes held up the steps: 92% of the time they waited for a core', '', '')
    """
    share = measured.get(HELD_UP_SHARE)
    if not isinstance(share, (int, float)) or not HELD_UP < share <= 1:
        return ""
    return f"measured while other processes held up the steps: {share:.0%} of the time they waited for a core"
