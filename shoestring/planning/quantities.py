"""What is predicted of a plan, listed once. Nothing heavy is imported: pages need it too."""
from __future__ import annotations

from shoestring.core.figures import Quantity

STEP_SECONDS = Quantity("step_seconds", "a step", "seconds")
MEASURABLE = (
    Quantity("peak_bytes", "tensors", counted=True),
    Quantity("process_bytes", "process"),
    STEP_SECONDS,
    Quantity("traffic_bytes", "disk, a step", counted=True, optional=True),
    Quantity("sent_bytes", "sent, a step", counted=True, optional=True),
    Quantity("sent_by_others_bytes", "sent by others, a step of theirs", counted=True, optional=True),
)
