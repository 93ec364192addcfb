"""The quantities that are predicted and measured for a federated run. Imports nothing heavy, because pages need it too."""

from __future__ import annotations

from shoestring.core.figures import Quantity

FEDERATED = (  # bytes are those of one device in one round
    Quantity("up_bytes", "up, a device", counted=True),
    Quantity("down_bytes", "down, a device", counted=True),
    Quantity("round_seconds", "a round", "seconds"),
    Quantity("total_seconds", "all rounds", "seconds"),
    Quantity("epsilon", "epsilon", "", optional=True),
)
